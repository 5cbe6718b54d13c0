"""Feed-forward trunks: a recipe is `(observation spec, rngs) -> module`, the module maps [N, ...] to [N, features]."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from podracer import mesh
from podracer.errors import UserError
from podracer.networks.initializers import orthogonal

Activation = Literal["tanh", "relu", "swish", "gelu", "elu"]


def floats(leaf: jax.Array) -> jax.Array:
    """float32; bytes, which travel as they are, become numbers in [0, 1] here, on the core."""
    return leaf.astype(jnp.float32) * (1.0 / 255.0 if leaf.dtype == jnp.uint8 else 1.0)


def flatten(observation: Any) -> jax.Array:
    """All leaves of the observation side by side, float32 [N, size]."""
    leaves = [floats(leaf.reshape(leaf.shape[0], -1)) for leaf in jax.tree.leaves(observation)]
    return leaves[0] if len(leaves) == 1 else jnp.concatenate(leaves, -1)


def flat_size(observation_spec: Any) -> int:
    """The size of `flatten`'s output."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(observation_spec))


def pictures(observation_spec: Any) -> list[Any]:
    """The leaves that are pictures: bytes in three axes, 32 or more along two of them."""
    leaves = jax.tree.leaves(observation_spec)
    return [x for x in leaves if x.dtype == np.uint8 and len(x.shape) == 3 and sorted(x.shape)[1] >= 32]


def linear(inputs: int, outputs: int, scale: float, rngs: nnx.Rngs) -> nnx.Linear:
    """A dense layer with orthogonal weights (Saxe et al. 2014) times `scale`, and zero biases."""
    product = _product if mesh.platform() == "cpu" else jax.lax.dot_general
    return nnx.Linear(inputs, outputs, kernel_init=orthogonal(scale), dot_general=product, rngs=rngs)


def _product(inputs: jax.Array, kernel: jax.Array, dimension_numbers: Any, **options: Any) -> jax.Array:
    """`lax.dot_general` for dense layers on CPUs."""
    if inputs.ndim != 2 or any(value is not None for value in options.values()):
        return jax.lax.dot_general(inputs, kernel, dimension_numbers, **options)
    return _matrix_product(inputs, kernel)


@jax.custom_vjp
def _matrix_product(inputs: jax.Array, kernel: jax.Array) -> jax.Array:
    """`inputs @ kernel`, [N, I] and [I, O], with a gradient of the kernel that is quick on CPUs.

    That gradient adds up over N, the leading axis of both operands, and XLA's product for this form packs both of them
    first. With the inputs transposed beforehand (the barrier keeps XLA from undoing it) it takes the quick one:
    a gradient step of two layers of 64 gets 5 to 7 % cheaper.
    """
    return inputs @ kernel


def _forward(inputs, kernel):
    return inputs @ kernel, (inputs, kernel)


def _backward(residuals, gradient):
    inputs, kernel = residuals
    return gradient @ kernel.T, jax.lax.optimization_barrier(inputs.T) @ gradient


_matrix_product.defvjp(_forward, _backward)


class Mlp(nnx.Module):
    """Dense layers, each with an activation and optionally a layer norm before it."""

    def __init__(self, observation_spec: Any, config: mlp, rngs: nnx.Rngs):
        seen = pictures(observation_spec)
        if seen:
            raise UserError(f"an mlp got pictures of shape {seen[0].shape}; choose --network nature or impala.")
        sizes = (flat_size(observation_spec), *config.hidden)
        pairs = list(itertools.pairwise(sizes))
        scale = math.sqrt(2.0)
        self.layers = nnx.List([linear(inputs, outputs, scale, rngs) for inputs, outputs in pairs])
        norms = [nnx.LayerNorm(outputs, rngs=rngs) for _, outputs in pairs] if config.layer_norm else []
        self.norms = nnx.List(norms)
        self.activation = config.activation

    def __call__(self, observation: Any) -> jax.Array:
        features = flatten(observation)
        for position, layer in enumerate(self.layers):
            features = layer(features)
            if self.norms:
                features = self.norms[position](features)
            features = getattr(jax.nn, self.activation)(features)
        return features


@dataclasses.dataclass(frozen=True)
class mlp:  # a recipe reads as what it makes
    """A multi-layer perceptron over the flattened observation."""

    hidden: tuple[int, ...] = (64, 64)
    """Sizes of the layers."""
    activation: Activation = "tanh"
    """The non-linearity after each layer."""
    layer_norm: bool = False
    """Normalise each layer before its activation (PQN needs it)."""

    def __call__(self, observation_spec: Any, rngs: nnx.Rngs) -> Mlp:
        return Mlp(observation_spec, self, rngs)
