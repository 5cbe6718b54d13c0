"""Catch: a ball falls through a grid, the paddle at the bottom must be under it (as in bsuite and the DQN papers)."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer.envs import api


class State(NamedTuple):
    ball_row: jax.Array  # [] int32
    ball_column: jax.Array  # [] int32
    paddle: jax.Array  # [] int32, column of the paddle in the last row


@dataclasses.dataclass(frozen=True)
class Catch:
    """Reward +1 for a caught ball, -1 for a missed one, at the end of each episode of `rows - 1` steps.

    Actions: 0 left, 1 stay, 2 right. Observation: float32 [rows, columns], 1 at the ball and at the paddle.
    """

    rows: int = 10
    columns: int = 5

    @property
    def spec(self) -> api.Spec:
        return api.Spec("catch", api.Array((self.rows, self.columns)), api.Discrete(3))

    def reset(self, key):
        column = jax.random.randint(key, (), 0, self.columns)
        state = State(jnp.zeros((), jnp.int32), column, jnp.full((), self.columns // 2, jnp.int32))
        return state, self._observe(state)

    def step(self, state, action, key):
        paddle = jnp.clip(state.paddle + action - 1, 0, self.columns - 1).astype(jnp.int32)
        state = State(state.ball_row + 1, state.ball_column, paddle)
        landed = state.ball_row == self.rows - 1
        reward = jnp.where(landed, jnp.where(state.ball_column == paddle, 1.0, -1.0), 0.0)
        return state, api.Step(self._observe(state), reward, landed, jnp.zeros((), bool))

    def _observe(self, state):
        row, column = jnp.arange(self.rows)[:, None], jnp.arange(self.columns)[None, :]
        ball = (row == state.ball_row) & (column == state.ball_column)
        paddle = (row == self.rows - 1) & (column == state.paddle)
        return (ball | paddle).astype(jnp.float32)

    def render(self, state):
        board = np.full((self.rows, self.columns, 3), (24, 26, 32), np.uint8)
        board[-1, int(state.paddle)] = (90, 200, 250)
        board[int(state.ball_row), int(state.ball_column)] = (255, 196, 60)
        return board.repeat(24, 0).repeat(24, 1)
