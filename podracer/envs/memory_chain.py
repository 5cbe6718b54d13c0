"""Memory chain: a cue is shown once, and asked for `length` steps later (after bsuite's memory_len)."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer.envs import api


class State(NamedTuple):
    cue: jax.Array  # [] int32, 0 or 1
    steps: jax.Array  # [] int32, steps of this episode


@dataclasses.dataclass(frozen=True)
class MemoryChain:
    """Reward +1 where the last action repeats the cue seen `length` steps before, else -1.

    An agent without a memory earns 0 on average. Actions: 0, 1. Observation: float32 [2]: the cue as -1 or +1
    (0 after the first step), and 1 when the answer is due.
    """

    length: int = 8

    @property
    def spec(self) -> api.Spec:
        return api.Spec("memory-chain", api.Array((2,)), api.Discrete(2))

    def reset(self, key):
        state = State(jax.random.randint(key, (), 0, 2), jnp.zeros((), jnp.int32))
        return state, self._observe(state)

    def step(self, state, action, key):
        due = state.steps == self.length
        reward = jnp.where(due, jnp.where(action == state.cue, 1.0, -1.0), 0.0)
        state = State(state.cue, state.steps + 1)
        return state, api.Step(self._observe(state), reward, due, jnp.zeros((), bool))

    def _observe(self, state):
        cue = jnp.where(state.steps == 0, 2.0 * state.cue - 1.0, 0.0)
        return jnp.stack([cue, (state.steps == self.length).astype(jnp.float32)])

    def render(self, state):
        image = np.full((48, 48 * (self.length + 1), 3), (24, 26, 32), np.uint8)
        image[:, :48] = (255, 196, 60) if int(state.cue) else (90, 200, 250)
        at = min(int(state.steps), self.length)
        image[40:, 48 * at : 48 * (at + 1)] = (230, 230, 230)
        return image
