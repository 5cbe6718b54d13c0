"""What Stochastic MuZero's network has beside MuZero's (Antonoglou et al. 2022): the player moves, then chance does.

    latent --action--> afterstate --outcome--> latent, reward --action--> ...
                           |
                       judge: probabilities of the outcomes, value

An outcome is one of M codes. What a code means is learnt: an encoder says from the observations before and after a
step which one it was, a one-hot vector. Its gradient passes straight through to the encoder's numbers, which a
commitment loss keeps near the code (section 3.1; a VQ-VAE whose codebook is fixed). The paper's encoder sees the last
observations, too: what chance did can often only be told from the difference.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from muzero.bodies import Layers, flat, unit
from muzero.support import cross_entropy
from podracer.types import Array


class Afterstate(NamedTuple):
    """What the network says of an afterstate."""

    outcome: Array  # [N, M] logits
    value: Array  # [N, value_bins] logits; of the reward of the outcome and all that follows


class Chance(NamedTuple):
    """What was said of the K afterstates of an unroll, and what really came."""

    said: Afterstate  # [K, B, ...]
    code: Array  # [K, B, M] one-hot
    numbers: Array  # [K, B, M] the encoder's, before they became a code


class Outcomes(nnx.Module):
    """Chance's side of the network.

    Args:
      body: the network's; has dynamics of the same kind made.
      heads: `outcomes` is M.
      hidden: units of the hidden layer of each head.
      rngs: flax's.
    """

    def __init__(self, body: Any, heads: Any, hidden: int, rngs: nnx.Rngs):
        size = math.prod(body.shape)
        self.dynamics = body.another(heads.outcomes, rngs)
        self.outcome_head = Layers(size, hidden, 1, heads.outcomes, 0.01, rngs)
        self.value_head = Layers(size, hidden, 1, heads.value_bins, 0.01, rngs)
        self.encoder = Layers(2 * size, hidden, 1, heads.outcomes, 1.0, rngs)

    def judge(self, afterstate: Array) -> Afterstate:
        """Of afterstates [N, ...]."""
        return Afterstate(self.outcome_head(flat(afterstate)), self.value_head(flat(afterstate)))

    def follow(self, afterstate: Array, code: Array) -> Array:
        """The latents [N, ...] after outcomes, one-hot [N, M]."""
        return unit(self.dynamics(afterstate, code))

    def encode(self, before: Array, after: Array) -> Array:
        """[N, M] numbers whose greatest is what happened between the observations of two latents [N, ...]."""
        return self.encoder(jnp.concatenate([flat(before), flat(after)], -1))


def spread(numbers: Array, mask: Array) -> Array:
    """The encoder's numbers [K, B, M], each of mean 0 and variance 1 over the steps of this batch in `mask` [K, B].

    Without it one code is the greatest everywhere at first, the commitment loss keeps it so, and no other is ever used
    (measured, see decision 019). Only training asks the encoder, always on a batch.
    """
    weight = mask[..., None] / jnp.maximum(jnp.sum(mask), 1)
    mean = jnp.sum(weight * numbers, (0, 1), keepdims=True)
    variance = jnp.sum(weight * (numbers - mean) ** 2, (0, 1), keepdims=True)
    return (numbers - mean) * jax.lax.rsqrt(variance + 1e-6)


def code_of(numbers: Array) -> Array:
    """One-hot codes [..., M] of the encoder's numbers, with the numbers' gradient (straight-through)."""
    code = jax.nn.one_hot(jnp.argmax(numbers, -1), numbers.shape[-1])
    return code + numbers - jax.lax.stop_gradient(numbers)


def losses(chance: Chance, value_target: Array) -> dict[str, Array]:
    """Per step and environment, [K, B] each (equation 6); targets have no gradient.

    Args:
      chance: of the unroll.
      value_target: [K, B, value_bins] two-hot, of the latents before the actions: an afterstate is worth, on average,
        what the state was in which its action was taken.
    """
    code = jax.lax.stop_gradient(chance.code)
    return {
        "outcome_loss": cross_entropy(code, chance.said.outcome),
        "afterstate_loss": cross_entropy(value_target, chance.said.value),
        "commitment_loss": jnp.sum((chance.numbers - code) ** 2, -1),
    }


def outcomes_used(code: Array, mask: Array) -> Array:
    """[] the perplexity of the codes [K, B, M] where `mask` [K, B]: how many are in use, if they are equally often."""
    shown = jnp.where(mask[..., None], code, 0.0).reshape(-1, code.shape[-1])
    share = jnp.sum(shown, 0) / jnp.maximum(jnp.sum(mask), 1)
    return jnp.exp(-jnp.sum(share * jnp.log(jnp.maximum(share, 1e-12))))
