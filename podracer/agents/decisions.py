"""The decisions of a trajectory as one batch that epochs can shuffle: what PPO and PQN share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podracer.agents.common import Experience
from podracer.errors import check_divides
from podracer.types import Array


class Decisions(NamedTuple):
    """[T, B] with a recurrent network, else [1, T * B]: without a memory every decision stands alone."""

    observation: Any
    first: Array
    network_state: Any  # [1, B, ...] before the first decision
    action: Any
    valid: Array  # the transition that follows is real
    own: Any  # what else the agent's loss needs, such as targets

    def unroll(self, outputs: Callable[[Any, Array, Any], Any]) -> Any:
        """`outputs(observation, first, network state [B])` of these decisions."""
        return outputs(self.observation, self.first, jax.tree.map(lambda leaf: leaf[0], self.network_state))


def values(experience: Experience, noted: Array, evaluate: Callable[[Any, Array, Any], Array]) -> Array:
    """Values [T + 1, B] of all time steps, under the weights that acted.

    Args:
      experience: T decisions.
      noted: [T, B], what the actors noted. It serves as it is; only the last observation has no value yet. With a
        recurrent network all are computed anew, because the state before the last observation is not at hand.
      evaluate: `(observation, first, network state) -> values`, the first two [T', B, ...].
    """
    sequence = experience.observation, experience.timestep.first
    if jax.tree.leaves(experience.network_state):
        return evaluate(*sequence, experience.network_state)
    observation, first = jax.tree.map(lambda leaf: leaf[-1:], sequence)
    return jnp.concatenate([noted, evaluate(observation, first, experience.network_state)])


def decisions(experience: Experience, valid: Array, own: Any, minibatches: int) -> Decisions:
    """What `learning.minibatch_epochs` shuffles. `valid` [T, B], leaves of `own` [T, B, ...].

    Raises:
      UserError: the batch cannot be divided into `minibatches`.
    """
    state = experience.network_state
    observation, first = jax.tree.map(lambda leaf: leaf[:-1], (experience.observation, experience.timestep.first))
    start = jax.tree.map(lambda leaf: leaf[None], state)
    batch = Decisions(observation, first, start, experience.action, valid, own)
    recurrent = bool(jax.tree.leaves(state))
    if not recurrent:
        batch = jax.tree.map(lambda leaf: leaf.reshape(1, -1, *leaf.shape[2:]), batch)
    size_name = "the number of environments per core" if recurrent else "batch x unroll_length"
    check_divides(size_name, batch.first.shape[1], "minibatches", minibatches)
    return batch
