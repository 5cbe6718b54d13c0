"""Runs of a second: the smallest agents, environments and settings that still have everything."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import muzero
from podracer import agents, networks
from podracer.envs import Catch, api

NETWORK = networks.mlp((8,))
# 2 cores x 4 environments x 5 steps = 40 steps per update, 80 per call.
SIZES = {"batch_per_core": 4, "unroll_length": 5, "updates_per_call": 2, "eval_episodes": 8}
STEPS_PER_CALL = 80


class Rows:
    """A sink that keeps what it is given."""

    def __init__(self):
        self.rows: list[dict[str, Any]] = []
        self.closed = False

    def write(self, row):
        self.rows.append(dict(row))

    def close(self):
        self.closed = True

    @property
    def training(self):
        return [row for row in self.rows if "updates" in row]

    @property
    def evaluations(self):
        return [row for row in self.rows if "eval_return_mean" in row]


def catch() -> Catch:
    return Catch(rows=5, columns=3)


def a2c(env: Any = None, **config: Any):
    config = dataclasses.replace(agents.a2c.__defaults__[0], **config)
    return agents.a2c((env or catch()).spec, config, NETWORK)


def planner(env: Any):
    """Learns from the second update on, from a ring that is full after the third: 10 sequences of 5 decisions."""
    config = muzero.GumbelConfig(
        num_simulations=2,
        unroll_steps=2,
        td_steps=2,
        sequence_length=5,
        replay_steps=50,
        min_replay=80,
        batch_size=8,
        value_bins=5,
        reward_bins=5,
        sampling="prioritised",
        value_target="network",
    )
    return muzero.gumbel_muzero(env.spec, config, muzero.network(8, 1, 8, "mlp"))


def leaves(tree: Any) -> list[np.ndarray]:
    """All leaves as numpy; typed PRNG keys as their data."""

    def plain(leaf):
        is_key = isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return [plain(leaf) for leaf in jax.tree.leaves(tree)]


def assert_same(left: Any, right: Any) -> None:
    """Two trees, bit for bit."""
    left, right = leaves(left), leaves(right)
    assert len(left) == len(right)
    for one, other in zip(left, right):
        np.testing.assert_array_equal(one, other)


class Steps(NamedTuple):
    steps: jax.Array  # [] int32


@dataclasses.dataclass(frozen=True)
class Poisoned:
    """Never ends; reward 1 per step, but one reward or observation of every environment's life is not a number."""

    at: int = 18
    reward: bool = True
    limit: int = 10  # of evaluations

    @property
    def spec(self):
        return api.Spec("poisoned", api.Array((2,)), api.Discrete(2), max_episode_steps=self.limit)

    def reset(self, key):
        state = Steps(jnp.zeros((), jnp.int32))
        return state, self._observe(state)

    def step(self, state, action, key):
        state = Steps(state.steps + 1)
        reward = jnp.where((state.steps == self.at) & self.reward, jnp.nan, 1.0)
        return state, api.Step(self._observe(state), reward, jnp.zeros((), bool), jnp.zeros((), bool))

    def _observe(self, state):
        bad = (state.steps == self.at) & (not self.reward)
        return jnp.where(bad, jnp.nan, jnp.ones(2))
