"""Trajectories cut into the sequences that replay keeps, with everything in them that could do harm removed."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podracer.errors import UserError
from podracer.types import Array, TimeStep, Trajectory


class Sequence(NamedTuple):
    """L decisions of one environment. In batches and in memory with a leading axis [N]."""

    observation: Any  # [L + 1, ...]; in memory as `frames.Packing` stores them
    timestep: TimeStep  # [L + 1], its observation is ()
    action: Any  # [L, ...]
    policy: Any  # of the search: [L, A] float32, or Sampled [L, ...]
    value: Array  # [L] float32, of the search's root


def cut(trajectory: Trajectory, policy: Any, value: Array, length: int) -> Sequence:
    """T decisions of B environments as sequences [B * T / L, ...], in any order.

    Raises:
      UserError: L does not divide T.
    """
    steps = value.shape[0]
    if steps % length:
        raise UserError(
            f"trajectories have {steps} decisions (unroll_length), which sequence_length = {length} does not divide. "
            f"Set sequence_length to {steps}, or unroll_length to a multiple of {length}."
        )

    def pieces(leaf):
        """[T, B, ...] -> [N, L, ...]."""
        parts = jnp.moveaxis(leaf.reshape(-1, length, *leaf.shape[1:]), 2, 1)
        return parts.reshape(-1, length, *leaf.shape[2:])

    def with_last(leaf):
        """[T + 1, B, ...] -> [N, L + 1, ...]; where one sequence ends, the next one begins."""
        return jnp.concatenate([pieces(leaf[:-1]), leaf[length::length].reshape(-1, 1, *leaf.shape[2:])], 1)

    timestep = jax.tree.map(with_last, trajectory.timestep)
    decisions = jax.tree.map(pieces, (trajectory.actor_output.action, policy, value))
    return Sequence(timestep.observation, timestep._replace(observation=()), *decisions)


def harmless(sequences: Sequence) -> tuple[Sequence, Array]:
    """Resets and ignored decisions set to 0, so that whatever stood there has no influence.

    Returns:
      The sequences [N, ...], and [N] bool: all of its numbers are finite. Where they are not, nothing is valid any
      more: one NaN must not come back with every sample for the rest of the run.
    """
    timestep, ignored = sequences.timestep, ~sequences.timestep.valid[:, 1:]
    timestep = timestep._replace(
        reward=jnp.where(timestep.valid, timestep.reward, 0.0),
        discount=jnp.where(timestep.valid, timestep.discount, 1.0),
    )

    def without_ignored(leaf):
        return jnp.where(ignored.reshape(ignored.shape + (1,) * (leaf.ndim - 2)), 0, leaf)

    action, policy = jax.tree.map(without_ignored, (sequences.action, sequences.policy))
    sequences = sequences._replace(timestep=timestep, action=action, policy=policy)
    floats = [leaf for leaf in jax.tree.leaves(sequences) if _is_float(leaf)]
    finite = [jnp.all(jnp.isfinite(leaf.reshape(leaf.shape[0], -1)), 1) for leaf in floats]
    finite = jnp.all(jnp.stack(finite), 0)
    timestep = timestep._replace(valid=timestep.valid & finite[:, None])

    def numbers(leaf):
        return jnp.nan_to_num(leaf, posinf=0.0, neginf=0.0) if _is_float(leaf) else leaf

    return jax.tree.map(numbers, sequences._replace(timestep=timestep)), finite


def _is_float(leaf: Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)
