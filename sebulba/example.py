"""Trajectories and time steps of zeros: for shapes, and to compile with."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.envs.host import HostEnvironment, host_time_step
from podracer.types import Agent, TimeStep, Trajectory


def example(agent: Agent, env: HostEnvironment, size: int, unroll_length: int) -> Trajectory:
    """A trajectory of `size` environments as `agent` makes it of observations of zeros: for shapes, inside a trace."""
    key = jax.random.key(0)
    params, actor_state = agent.initial_learner_state(key).params, agent.initial_actor_state(size)
    timestep = start(zeros(env.spec.observation, size), size)
    output, _ = agent.actor_step(params, actor_state, timestep, key)
    repeat = lambda tree, times: jax.tree.map(lambda leaf: jnp.stack([jnp.asarray(leaf)] * times), tree)
    return Trajectory(repeat(timestep, unroll_length + 1), repeat(output, unroll_length), actor_state)


def zeros(spec: Any, batch_size: int) -> Any:
    """Observations [B, ...] of a spec; action masks allow everything."""
    return jax.tree.map(lambda leaf: np.full((batch_size, *leaf.shape), np.dtype(leaf.dtype) == bool, leaf.dtype), spec)


def start(observation: Any, batch_size: int) -> TimeStep:
    """The time step of a first reset."""
    ones = np.ones(batch_size, np.float32)
    return host_time_step(observation, 0 * ones, ones, ones > 0, ones < 0)
