"""What an environment is: a spec, `reset` and `step` for ONE environment, as pure functions.

A user's environment is any object with these three members; `batch.py` makes batches of it, resets it and builds
the time steps that agents see.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax

from podracer.specs import Action, Array, Continuous, Discrete, MultiDiscrete, PyTree, Spec

__all__ = ["Action", "Array", "Continuous", "Discrete", "Environment", "MultiDiscrete", "Spec", "Step"]


class Step(NamedTuple):
    """What one environment says after one action."""

    observation: PyTree  # [...] the true next observation, also at the end of an episode
    reward: jax.Array  # [] float
    terminated: jax.Array  # [] bool, the task itself ended; nothing is worth bootstrapping
    truncated: jax.Array  # [] bool, the episode was cut (a time limit); the value goes on


class Environment(Protocol):
    """One jittable environment. Members are pure; the state is any pytree of arrays of fixed shape."""

    @property
    def spec(self) -> Spec: ...

    def reset(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """`(state, observation)` of a new episode."""
        ...

    def step(self, state: PyTree, action: jax.Array, key: jax.Array) -> tuple[PyTree, Step]:
        """Act once. `key` serves random transitions; ignore it where there are none."""
        ...


# An environment that can be drawn also has `render(state) -> uint8 [height, width, 3]` (numpy, on the host).
