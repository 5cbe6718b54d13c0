"""Search over a sample of the actions, where they are too many or too continuous to try all (Hubert et al. 2021).

Each node draws K actions from a proposal beta; they are its edges. What the search then says of the sample holds for
the whole space when its prior is corrected for how the sample was drawn (section 4, equation 4):

    prior(a) ~ count(a) / K * pi(a) / beta(a)        uniform, where the proposal is the policy itself

Equal actions are one edge: the first of them has all of their prior, the others are illegal. Where the space holds no
more than K actions nothing is drawn: the edges are all actions, and the search is the ordinary one.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from muzero.qvalues import ILLEGAL
from muzero.support import cross_entropy
from podracer.networks.policies import Policy, mask_logits, policy
from podracer.specs import Action, Continuous, Discrete, MultiDiscrete
from podracer.types import Array


class Sampled(NamedTuple):
    """What a search wants of some actions; in place of an array [..., A] that is about all of them."""

    weights: Array  # [..., K] their shares; 0 where an action repeats an earlier one
    actions: Array  # [..., K, ...]


class Draw(NamedTuple):
    """The edges of N nodes."""

    actions: Array  # [N, K, ...]
    logits: Array  # [N, K] of the corrected prior, not normalised; ILLEGAL where not legal
    legal: Array  # [N, K] bool; False where an action repeats an earlier one, or must not be taken


@dataclasses.dataclass(frozen=True)
class Sampler:
    """How nodes draw their actions.

    Args:
      action: the space.
      number: K, at most.
    """

    action: Action
    number: int

    @property
    def policy(self) -> Policy:
        return policy(self.action)

    @property
    def every(self) -> np.ndarray | None:
        """All actions [K, ...] of the space where they are no more than `number`; else None."""
        if isinstance(self.action, Continuous):
            return None
        sizes = (self.action.num_values,) if isinstance(self.action, Discrete) else self.action.num_values
        if math.prod(sizes) > self.number:
            return None
        table = np.stack(np.meshgrid(*(np.arange(size, dtype=np.int32) for size in sizes), indexing="ij"), -1)
        table = table.reshape(-1, len(sizes))
        return table[:, 0] if isinstance(self.action, Discrete) else table

    @property
    def edges(self) -> int:
        """K, as it is: fewer where the space is smaller."""
        return self.number if self.every is None else len(self.every)

    def draw(
        self,
        key: Array,
        numbers: Array,
        legal: Array | None = None,
        explore: float = 0.0,
        with_mode: bool = False,
    ) -> Draw:
        """Edges of N nodes.

        Args:
          key: for the sample.
          numbers: [N, P] of the policy.
          legal: [N, A] bool, the actions of a discrete space that may be taken; None: all.
          explore: share of the proposal that is the widest policy there is instead: every action alike, or a standard
            normal. The prior is corrected for it; a number of Python's, 0 draws from the policy alone.
          with_mode: the first sample is the policy's most likely action.
        """
        size = numbers.shape[0]
        if self.every is not None:
            actions = jnp.broadcast_to(jnp.asarray(self.every)[None], (size, *self.every.shape))
            allowed = jnp.ones((size, self.edges), bool) if legal is None else legal
            return self._draw(actions, self._log_probs(numbers, actions), allowed)
        mine, wide = mask_logits(numbers, legal), mask_logits(jnp.zeros_like(numbers), legal)
        actions = self._proposed(key, mine, wide, explore)
        if with_mode:
            actions = actions.at[:, 0].set(self.policy.mode(mine))
        correction = jnp.zeros(actions.shape[:2])
        if explore:
            log_pi, log_wide = (self._log_probs(each, actions) for each in (mine, wide))
            correction = log_pi - jnp.logaddexp(math.log1p(-explore) + log_pi, math.log(explore) + log_wide)
        return self._draw(*self._merged(actions, correction))

    def _proposed(self, key: Array, mine: Array, wide: Array, explore: float) -> Array:
        """K actions each from policies [N, P]: from `wide` with probability `explore`, else from `mine`."""
        own_key, wide_key, which_key = jax.random.split(key, 3)
        actions = self._sample(own_key, mine)
        if not explore:
            return actions
        other = jax.random.bernoulli(which_key, explore, actions.shape[:2])
        return jnp.where(other.reshape(other.shape + (1,) * (actions.ndim - 2)), self._sample(wide_key, wide), actions)

    def _sample(self, key: Array, numbers: Array) -> Array:
        spread = jnp.broadcast_to(numbers[:, None], (numbers.shape[0], self.number, numbers.shape[1]))
        return self.policy.sample(key, spread)

    def _log_probs(self, numbers: Array, actions: Array) -> Array:
        return self.policy.log_prob(numbers[:, None], actions)

    def _merged(self, actions: Array, correction: Array) -> tuple[Array, Array, Array]:
        """Actions, the logits of their prior, and where each is the first of its kind."""
        if isinstance(self.action, Continuous):
            return actions, correction, jnp.ones(correction.shape, bool)
        flat = actions.reshape(*correction.shape, -1)
        same = jnp.all(flat[:, :, None] == flat[:, None], -1)  # [N, K, K]
        earlier = jnp.tril(jnp.ones(same.shape[1:], bool), -1)[None]
        return actions, correction + jnp.log(jnp.sum(same, -1)), ~jnp.any(same & earlier, -1)

    @staticmethod
    def _draw(actions: Array, logits: Array, legal: Array) -> Draw:
        return Draw(actions, jnp.where(legal, logits, ILLEGAL), legal)


def blank(action: Action, number: int) -> Sampled:
    """A policy over no actions, for a memory."""
    return Sampled(jnp.zeros(number), jnp.zeros((number, *blank_action(action).shape), blank_action(action).dtype))


def blank_action(action: Action) -> Array:
    """An action of zeros."""
    if isinstance(action, Discrete):
        return jnp.zeros((), jnp.int32)
    if isinstance(action, MultiDiscrete):
        return jnp.zeros(len(action.num_values), jnp.int32)
    return jnp.zeros(action.size, jnp.float32)


def weights_of(target: Any) -> Array:
    """[..., A or K] the shares in what a search wanted."""
    return target.weights if isinstance(target, Sampled) else target


def imitation(actions: Policy, target: Any, numbers: Array) -> Array:
    """[...] cross-entropy of the policy `numbers` [..., P] against what a search wanted: -sum w_i log pi(a_i)."""
    if not isinstance(target, Sampled):
        return cross_entropy(target, numbers)
    return -jnp.sum(target.weights * actions.log_prob(numbers[..., None, :], target.actions), -1)
