"""A game in which chance moves between two decisions: roll a die, then say what it shows.

podracer train anakin --env tests/muzero/dice.py:Dice --agent stochastic-muzero
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from podracer.envs import api


class State(NamedTuple):
    shown: jax.Array  # [] int32, what the die shows; -1: it was not rolled yet


@dataclasses.dataclass(frozen=True)
class Dice:
    """Action 0 takes `safe` and ends the game; any other rolls a die. Then the action that equals the die earns 1,
    any other -1, and the game is over.

    Who sees the die is always right, so that rolling is worth 1. A model without chance has but one state after the
    roll, in which at first every guess is worth 2 / sides - 1: less than what is safe. Observation: float32
    [sides + 1], one-hot, the last for the die that was not rolled.
    """

    sides: int = 4
    safe: float = 0.25

    @property
    def spec(self) -> api.Spec:
        return api.Spec("dice", api.Array((self.sides + 1,)), api.Discrete(self.sides))

    def reset(self, key):
        state = State(jnp.full((), -1, jnp.int32))
        return state, self._observe(state)

    def step(self, state, action, key):
        rolled = state.shown >= 0
        won = jnp.where(action == state.shown, 1.0, -1.0)
        over = rolled | (action == 0)
        reward = jnp.where(rolled, won, jnp.where(action == 0, self.safe, 0.0))
        state = State(jnp.where(over, -1, jax.random.randint(key, (), 0, self.sides)).astype(jnp.int32))
        return state, api.Step(self._observe(state), reward, over, jnp.zeros((), bool))

    def _observe(self, state):
        return jax.nn.one_hot(state.shown % (self.sides + 1), self.sides + 1)
