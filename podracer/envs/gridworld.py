"""A grid world of the kind that the Podracer paper's Anakin example uses: walk to a goal between walls."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer.envs import api

MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))  # up, right, down, left


class State(NamedTuple):
    position: jax.Array  # [2] int32: row, column
    goal: jax.Array  # [2] int32
    steps: jax.Array  # [] int32, steps of this episode


@dataclasses.dataclass(frozen=True)
class GridWorld:
    """Reward 1 at the goal (terminates), 0 elsewhere; truncates after `max_steps`.

    Start and goal are drawn anew each episode among the free cells. Actions: 0 up, 1 right, 2 down, 3 left; walls
    and borders stop the walker. Observation: float32 [size, size, 3], one plane each for walker, goal and walls.
    """

    size: int = 7
    max_steps: int = 50

    @property
    def spec(self) -> api.Spec:
        observation = api.Array((self.size, self.size, 3))
        return api.Spec("gridworld", observation, api.Discrete(4), truncates=True, max_episode_steps=self.max_steps)

    @property
    def walls(self) -> np.ndarray:
        """bool [size, size]: a cross of walls with a door in each arm, the four-rooms layout of Sutton et al. 1999."""
        walls = np.zeros((self.size, self.size), bool)
        middle = self.size // 2
        walls[middle, :] = walls[:, middle] = True
        for door in (self.size // 4, self.size - 1 - self.size // 4):
            walls[middle, door] = walls[door, middle] = False
        return walls

    def reset(self, key):
        free = np.argwhere(~self.walls).astype(np.int32)
        start = jax.random.randint(key, (), 0, len(free))
        # Any other free cell: an offset that is never a whole turn.
        offset = jax.random.randint(jax.random.fold_in(key, 0), (), 1, len(free))
        cells = jnp.asarray(free)
        state = State(cells[start], cells[(start + offset) % len(free)], jnp.zeros((), jnp.int32))
        return state, self._observe(state)

    def step(self, state, action, key):
        target = jnp.clip(state.position + jnp.asarray(MOVES, jnp.int32)[action], 0, self.size - 1)
        blocked = jnp.asarray(self.walls)[target[0], target[1]]
        position = jnp.where(blocked, state.position, target)
        state = State(position, state.goal, state.steps + 1)
        reached = jnp.all(position == state.goal)
        truncated = (state.steps >= self.max_steps) & ~reached
        return state, api.Step(self._observe(state), reached.astype(jnp.float32), reached, truncated)

    def _observe(self, state):
        row, column = jnp.arange(self.size)[:, None], jnp.arange(self.size)[None, :]
        walker = (row == state.position[0]) & (column == state.position[1])
        goal = (row == state.goal[0]) & (column == state.goal[1])
        return jnp.stack([walker, goal, jnp.asarray(self.walls)], -1).astype(jnp.float32)

    def render(self, state):
        board = np.full((self.size, self.size, 3), (24, 26, 32), np.uint8)
        board[self.walls] = (90, 94, 104)
        board[tuple(np.asarray(state.goal))] = (120, 220, 120)
        board[tuple(np.asarray(state.position))] = (255, 196, 60)
        return board.repeat(24, 0).repeat(24, 1)
