"""Orthogonal initial weights without LAPACK."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def orthogonal(scale: float = 1.0) -> Callable[..., jax.Array]:
    """Random orthonormal rows or columns (Saxe et al. 2014) times `scale`, for matrices and anything reshaped to one.

    The orthogonal factor of a normal matrix by Newton-Schulz iteration instead of a QR decomposition: matrix products
    only. On a CPU a QR is a LAPACK call that borrows threads from the pool it runs in; two virtual cores that
    initialise several networks at once each (many runs in one program) then wait for each other for ever.
    """

    def init(key: jax.Array, shape: Any, dtype: Any = jnp.float32, out_sharding: Any = None) -> jax.Array:
        columns = shape[-1]
        normal = jax.random.normal(key, (math.prod(shape[:-1]), columns))
        wide = normal.shape[0] < columns
        tall = normal.T if wide else normal
        # Singular values must start in (0, sqrt(3)); the product of these two norms bounds the largest one's square.
        bound = jnp.sqrt(jnp.max(jnp.sum(jnp.abs(tall), 0)) * jnp.max(jnp.sum(jnp.abs(tall), 1)))
        identity = jnp.eye(tall.shape[1])

        def unfinished(carry):
            step, _, error = carry
            return (step < 100) & (error > 1e-6)

        def improve(carry):
            step, matrix, _ = carry
            gram = jnp.dot(matrix.T, matrix, precision="highest")
            # Each singular value s becomes s (3 - s^2) / 2, which has its only stable fixed point at 1.
            better = jnp.dot(matrix, 1.5 * identity - 0.5 * gram, precision="highest")
            return step + 1, better, jnp.max(jnp.abs(gram - identity))

        _, matrix, _ = jax.lax.while_loop(unfinished, improve, (0, tall / bound, jnp.float32(jnp.inf)))
        return (scale * (matrix.T if wide else matrix)).reshape(shape).astype(dtype)

    return init
