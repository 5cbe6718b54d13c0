"""The processes of one run, one per host. Where there is one, everything here costs nothing.

Whatever is decided from a clock, a signal or a random number of this host must be decided once for all of them, or they
leave each other waiting in a collective: `from_first` is how.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def count() -> int:
    """How many hosts train together."""
    return jax.process_count()


def index() -> int:
    """Which of them this is, from 0."""
    return jax.process_index()


def is_first() -> bool:
    """Whether this host speaks for all: it writes the metrics and talks to the terminal."""
    return index() == 0


def from_first(value: Any) -> Any:
    """What the first host says; `value` (numbers or arrays, of one shape everywhere) where there is only one.

    All hosts must call it, in the same order.
    """
    if count() == 1:
        return value
    from jax.experimental import multihost_utils

    return jax.tree.map(np.asarray, multihost_utils.broadcast_one_to_all(value))
