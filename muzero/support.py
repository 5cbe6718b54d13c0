"""Values and rewards as categorical distributions: the invertible transform, its support, and two-hot targets.

After Schrittwieser et al. 2020, appendix F: a network that predicts a distribution over a fixed support learns numbers
of any scale with a gradient of one scale.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from podracer.types import Array

EPSILON = 0.001


def transform(x: Array) -> Array:
    """h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x (Pohlen et al. 2018, proposition A.2), without its cancellation."""
    size = jnp.abs(x)
    return jnp.sign(x) * (size / (jnp.sqrt(size + 1.0) + 1.0)) + EPSILON * x


def inverse(y: Array) -> Array:
    """The x with h(x) = y. Written without the difference of like numbers that the textbook form has."""
    size = jnp.abs(y)
    root = 2.0 * (size + 1.0 + EPSILON) / (jnp.sqrt(1.0 + 4.0 * EPSILON * (size + 1.0 + EPSILON)) + 1.0)
    return jnp.sign(y) * jnp.maximum(root * root - 1.0, 0.0)


@dataclasses.dataclass(frozen=True)
class Support:
    """`bins` numbers, evenly spaced between h(-limit) and h(limit).

    Attributes:
      limit: the largest number that can be expressed, in the units of the number itself.
      bins: how many there are; odd, so that 0 is one of them.
    """

    limit: Array | float
    bins: int

    def two_hot(self, x: Array) -> Array:
        """The distribution [..., bins] on the two bins next to h(x) whose mean is h(x); x is clipped to the limit."""
        top = transform(jnp.asarray(self.limit, jnp.float32))
        share = jnp.clip(transform(x) / top, -1.0, 1.0)
        place = (share + 1.0) * (0.5 * (self.bins - 1))
        positions = jax.lax.broadcasted_iota(jnp.float32, (*x.shape, self.bins), x.ndim)
        return jnp.maximum(1.0 - jnp.abs(place[..., None] - positions), 0.0)

    def mean(self, logits: Array) -> Array:
        """The number [...] that `logits` [..., bins] say: h^-1 of the mean."""
        top = transform(jnp.asarray(self.limit, jnp.float32))
        positions = jnp.linspace(-1.0, 1.0, self.bins).reshape(*(1,) * (logits.ndim - 1), -1)
        return inverse(top * jnp.sum(jax.nn.softmax(logits) * positions, -1))

    def clipped(self, x: Array) -> Array:
        """Where a target lies outside of the support, [...] bool: it is learnt too small."""
        return jnp.abs(x) > self.limit


def cross_entropy(target: Array, logits: Array) -> Array:
    """-sum target log softmax(logits), over the last axis; actions that no target wants cost nothing."""
    return -jnp.sum(target * jax.nn.log_softmax(logits), -1)
