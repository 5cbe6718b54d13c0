"""Running mean and variance of observations and returns, exact over cores and batches.

The statistics are part of the params: the actor that chose an action and the learner that trains on it use the same
version of them, so the first importance ratio of an update is 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podracer import mesh

CLIP = 10.0  # standard deviations, as in OpenAI's baselines


class Moments(NamedTuple):
    """Running moments of a pytree of features."""

    count: jax.Array  # [] float32
    mean: Any  # [...] per leaf
    square: Any  # [...] per leaf, mean squared deviation


def initial(example: Any) -> Moments:
    """No data yet: mean 0, variance 1, so that normalising changes nothing; bytes begin as numbers in [0, 1]."""
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), example)

    def square(leaf):
        return jnp.full(leaf.shape, 255.0**2 if leaf.dtype == jnp.uint8 else 1.0, jnp.float32)

    return Moments(jnp.zeros(()), zeros, jax.tree.map(square, example))


def update(moments: Moments, values: Any, mask: jax.Array, axis_name: str | None) -> Moments:
    """Fold in `values` [T, B, ...] where `mask` [T, B], from all cores (Chan et al. 1979, the parallel update)."""
    count = mesh.total(jnp.sum(mask, dtype=jnp.float32), axis_name)
    total = moments.count + count
    safe = jnp.maximum(count, 1.0)

    def masked_sum(leaf):
        weight = mask.reshape(mask.shape + (1,) * (leaf.ndim - mask.ndim))
        return jnp.sum(jnp.where(weight, leaf, 0.0), tuple(range(mask.ndim)))

    values = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), values)
    batch_mean = jax.tree.map(lambda leaf: mesh.total(masked_sum(leaf), axis_name) / safe, values)
    squares = jax.tree.map(lambda leaf, mean: masked_sum(_minus(leaf, mean) ** 2), values, batch_mean)
    batch_square = jax.tree.map(lambda leaf: leaf / safe, mesh.total(squares, axis_name))

    share = count / jnp.maximum(total, 1.0)
    mean = jax.tree.map(lambda old, new: old + (new - old) * share, moments.mean, batch_mean)

    def fold(old, new, old_mean, new_mean):
        spread = (new_mean - old_mean) ** 2 * share * (1.0 - share)
        return jnp.where(total > 0, old * (1.0 - share) + new * share + spread, old)

    square = jax.tree.map(fold, moments.square, batch_square, moments.mean, batch_mean)
    new = Moments(total, mean, square)
    # One NaN or infinity must not stay in the statistics for the rest of the run.
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves((mean, square))]))
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, moments)


def normalise(moments: Moments, values: Any) -> Any:
    """`values` with mean 0 and variance 1, clipped to 10 standard deviations."""

    def one(leaf, mean, square):
        inverse_std = jnp.broadcast_to(jax.lax.rsqrt(square + 1e-8), leaf.shape)
        return jnp.clip(_minus(leaf.astype(jnp.float32), mean) * inverse_std, -CLIP, CLIP)

    return jax.tree.map(one, values, moments.mean, moments.square)


def _minus(leaf: jax.Array, mean: jax.Array) -> jax.Array:
    """`leaf` [..., D] minus `mean` [D]."""
    return leaf - jnp.broadcast_to(mean, leaf.shape)


def scale(moments: Moments) -> jax.Array:
    """What rewards are multiplied by so that returns have variance 1; 1 before there are data."""
    return jax.lax.rsqrt(moments.square + 1e-8)
