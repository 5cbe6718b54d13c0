"""What Orbax's threads still say of a write that has failed and was reported: left out."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Inside, neither hook for errors of other threads hears of TensorStore reporting to a loop that is gone.

    On several hosts, one of those hooks ends them all.
    """
    uncaught, unraisable = sys.excepthook, sys.unraisablehook

    def when_uncaught(kind: Any, error: Any, trace: Any) -> None:
        if not _is_echo(error):
            uncaught(kind, error, trace)

    def when_unraisable(found: Any) -> None:
        if not _is_echo(found.exc_value):
            unraisable(found)

    sys.excepthook, sys.unraisablehook = when_uncaught, when_unraisable
    try:
        yield
    finally:
        sys.excepthook, sys.unraisablehook = uncaught, unraisable


def _is_echo(error: Any) -> bool:
    return str(error) == "Event loop is closed"
