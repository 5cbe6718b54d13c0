"""Convolutional trunks for frames: the Nature CNN, IMPALA's shallow network and its residual network.

Frames come as uint8, stacked in the first axis [stack, height, width] (as emulators give them) or in the last; they
travel as bytes and become floats in [0, 1] here, on the core.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from podracer.errors import UserError
from podracer.networks.convolution import Padding, convolve
from podracer.networks.initializers import orthogonal
from podracer.networks.mlp import linear


class Conv(nnx.Module):
    """A square convolution with bias."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int, padding: Padding, rngs: nnx.Rngs):
        self.kernel = nnx.Param(orthogonal(math.sqrt(2.0))(rngs.params(), (size, size, inputs, outputs)))
        self.bias = nnx.Param(jnp.zeros(outputs))
        self.stride, self.padding = stride, padding

    def __call__(self, images: jax.Array) -> jax.Array:
        return convolve(images, self.kernel[...], self.stride, self.padding) + self.bias[...]


def frames(observation: Any) -> jax.Array:
    """uint8 or float frames [N, ...] as float32 [N, height, width, planes]; bytes are scaled to [0, 1]."""
    (images,) = jax.tree.leaves(observation)
    scale = 1.0 / 255.0 if images.dtype == jnp.uint8 else 1.0
    if _planes_first(images.shape[1:]):
        images = jnp.moveaxis(images, 1, -1)
    return images.astype(jnp.float32) * scale


def _planes_first(shape: tuple[int, ...]) -> bool:
    return shape[0] < min(shape[1], shape[2])


def _planes(observation_spec: Any) -> int:
    leaves = jax.tree.leaves(observation_spec)
    if len(leaves) != 1 or len(leaves[0].shape) != 3:
        shapes = [leaf.shape for leaf in leaves]
        raise UserError(
            f"a convolutional network got observations {shapes}; expected one of 3 axes. Choose --network mlp."
        )
    return leaves[0].shape[0] if _planes_first(leaves[0].shape) else leaves[0].shape[2]


class _Residual(nnx.Module):
    """relu, conv, relu, conv, plus the input."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.first = Conv(width, width, 3, 1, "SAME", rngs)
        self.second = Conv(width, width, 3, 1, "SAME", rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        return images + self.second(jax.nn.relu(self.first(jax.nn.relu(images))))


class _Stage(nnx.Module):
    """conv, max-pool by 2, two residual blocks."""

    def __init__(self, inputs: int, width: int, rngs: nnx.Rngs):
        self.conv = Conv(inputs, width, 3, 1, "SAME", rngs)
        self.blocks = nnx.List([_Residual(width, rngs) for _ in range(2)])

    def __call__(self, images: jax.Array) -> jax.Array:
        images = nnx.max_pool(self.conv(images), (3, 3), (2, 2), "SAME")
        for block in self.blocks:
            images = block(images)
        return images


class Convolutional(nnx.Module):
    """Convolutions, then one dense layer."""

    def __init__(self, observation_spec: Any, config: cnn, rngs: nnx.Rngs):
        inputs, stages = _planes(observation_spec), []
        for width, (size, stride) in zip(config.widths, config.windows, strict=True):
            stages.append(
                _Stage(inputs, width, rngs)
                if config.kind == "resnet"
                else Conv(inputs, width, size, stride, "VALID", rngs)
            )
            inputs = width
        self.stages = nnx.List(stages)
        probe = jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape), leaf.dtype), observation_spec)
        flat = math.prod(jax.eval_shape(self._convolutions, probe).shape)
        self.dense = linear(flat, config.dense, math.sqrt(2.0), rngs)

    def _convolutions(self, observation: Any) -> jax.Array:
        images = frames(observation)
        for stage in self.stages:
            images = jax.nn.relu(stage(images)) if isinstance(stage, Conv) else stage(images)
        return jax.nn.relu(images)

    def __call__(self, observation: Any) -> jax.Array:
        features = self._convolutions(observation)
        return jax.nn.relu(self.dense(features.reshape(features.shape[0], -1)))


@dataclasses.dataclass(frozen=True)
class cnn:  # a recipe reads as what it makes
    """A convolutional trunk."""

    kind: Literal["plain", "resnet"] = "plain"
    """Plain convolutions with strides, or residual stages with pooling."""
    widths: tuple[int, ...] = (32, 64, 64)
    """Planes of each convolution or stage."""
    windows: tuple[tuple[int, int], ...] = ((8, 4), (4, 2), (3, 1))
    """Size and stride of each plain convolution; residual stages need one entry each, which they ignore."""
    dense: int = 512
    """Units of the dense layer at the end."""

    def __post_init__(self):
        if len(self.widths) != len(self.windows):
            raise UserError(f"widths has {len(self.widths)} entries and windows {len(self.windows)}; expected as many.")

    def __call__(self, observation_spec: Any, rngs: nnx.Rngs) -> Convolutional:
        return Convolutional(observation_spec, self, rngs)


def nature() -> cnn:
    """The network of Mnih et al. 2015."""
    return cnn()


def impala_shallow() -> cnn:
    """The small network of Espeholt et al. 2018 (figure 3, left, without the LSTM)."""
    return cnn("plain", (16, 32), ((8, 4), (4, 2)), 256)


def impala_resnet(widths: tuple[int, ...] = (16, 32, 32)) -> cnn:
    """The large network of Espeholt et al. 2018 (figure 3, right, without the LSTM); `widths` per stage."""
    return cnn("resnet", widths, tuple((3, 1) for _ in widths), 256)
