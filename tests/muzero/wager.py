"""A game that cannot be planned without chance: draw a card, then bet on it or fold.

podracer train anakin --env tests/muzero/wager.py:Wager --agent stochastic-muzero
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from podracer.envs import api


class State(NamedTuple):
    card: jax.Array  # [] int32, 0: none drawn, 1: a bad one, 2: a good one


@dataclasses.dataclass(frozen=True)
class Wager:
    """First: action 0 earns `safe` and ends the game, action 1 draws a card, which is good with probability `good`.

    Then, with the card in view: action 1 bets, which earns 1 with a good card and costs 1 with a bad one; action 0
    folds, which costs `fold`. Drawing is worth `good - (1 - good) * fold`, by default -0.125, less than what is safe.

    Who sees the card bets when it is good. Of such experience a model without chance learns that bets win: in its
    imagination drawing and betting earns 1, and the better it plays with the card, the surer it is. Observation:
    float32 [3], one-hot.
    """

    good: float = 0.25
    safe: float = 0.25
    fold: float = 0.5

    @property
    def spec(self) -> api.Spec:
        return api.Spec("wager", api.Array((3,)), api.Discrete(2))

    def reset(self, key):
        state = State(jnp.zeros((), jnp.int32))
        return state, self._observe(state)

    def step(self, state, action, key):
        drawn = state.card > 0
        bet = jnp.where(state.card == 2, 1.0, -1.0)
        over = drawn | (action == 0)
        reward = jnp.where(drawn, jnp.where(action == 1, bet, -self.fold), jnp.where(action == 0, self.safe, 0.0))
        card = 1 + jax.random.bernoulli(key, self.good).astype(jnp.int32)
        state = State(jnp.where(over, 0, card))
        return state, api.Step(self._observe(state), reward, over, jnp.zeros((), bool))

    def _observe(self, state):
        return jax.nn.one_hot(state.card, 3)
