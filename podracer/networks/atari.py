"""Convolutional trunks for frames: the Nature CNN, IMPALA's shallow network and its residual network.

Frames come as uint8, stacked in the first axis [stack, height, width] (as emulators give them) or in the last; they
travel as bytes and become floats in [0, 1] here, on the core. A memory is put on any of them by `recurrent`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from podracer.errors import UserError
from podracer.networks.convolution import Padding, convolve
from podracer.networks.initializers import orthogonal
from podracer.networks.mlp import flat_size, flatten, floats, linear


class Conv(nnx.Module):
    """A square convolution with bias."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int, padding: Padding, rngs: nnx.Rngs):
        self.kernel = nnx.Param(orthogonal(math.sqrt(2.0))(rngs.params(), (size, size, inputs, outputs)))
        self.bias = nnx.Param(jnp.zeros(outputs))
        self.stride = stride
        self.padding: Padding = padding

    def __call__(self, images: jax.Array) -> jax.Array:
        return convolve(images, self.kernel[...], self.stride, self.padding) + self.bias[...].reshape(1, 1, 1, -1)


def frames(picture: jax.Array) -> jax.Array:
    """uint8 or float frames [N, ...] as float32 [N, height, width, planes]; bytes are scaled to [0, 1]."""
    if _planes_first(picture.shape[1:]):
        picture = jnp.moveaxis(picture, 1, -1)
    return floats(picture)


def _planes_first(shape: tuple[int, ...]) -> bool:
    return shape[0] < min(shape[1], shape[2])


def _split(observation: Any, axes: int) -> tuple[list, list]:
    """Leaves of `axes` axes, and the others."""
    leaves = jax.tree.leaves(observation)
    return [x for x in leaves if len(x.shape) == axes], [x for x in leaves if len(x.shape) != axes]


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
    """Convolutions, then one dense layer, which also sees whatever the observation has beside its picture."""

    def __init__(self, observation_spec: Any, stages: Callable[[int], list], config: cnn | resnet, rngs: nnx.Rngs):
        pictures, rest = _split(observation_spec, 3)
        if len(pictures) != 1:
            shapes = [leaf.shape for leaf in jax.tree.leaves(observation_spec)]
            raise UserError(
                f"a convolutional network got observations of shapes {shapes}; expected one of 3 axes, a picture. "
                "Choose --network mlp."
            )
        shape = pictures[0].shape
        self.stages = nnx.List(stages(shape[0] if _planes_first(shape) else shape[2]))
        norms = [nnx.LayerNorm(width, rngs=rngs) for width in (*config.widths, config.dense)]
        self.norms = nnx.List(norms if config.layer_norm else [])
        probe = jnp.zeros((1, *shape), pictures[0].dtype)
        flat = math.prod(jax.eval_shape(self._convolutions, probe).shape)
        if not flat:
            raise UserError(f"pictures of shape {shape} are too small for {config}. Choose --network impala or mlp.")
        self.dense = linear(flat + flat_size(rest), config.dense, math.sqrt(2.0), rngs)

    def _convolutions(self, picture: jax.Array) -> jax.Array:
        images = frames(picture)
        for position, stage in enumerate(self.stages):
            images = self._norm(position, stage(images))
            images = jax.nn.relu(images) if isinstance(stage, Conv) else images
        return jax.nn.relu(images)

    def _norm(self, position: int, images: jax.Array) -> jax.Array:
        return self.norms[position](images) if self.norms else images

    def __call__(self, observation: Any) -> jax.Array:
        (picture,), rest = _split(observation, 4)
        seen = self._convolutions(picture)
        seen = seen.reshape(seen.shape[0], -1)
        seen = jnp.concatenate([seen, flatten(rest)], -1) if rest else seen
        return jax.nn.relu(self._norm(-1, self.dense(seen)))


@dataclasses.dataclass(frozen=True)
class cnn:  # a recipe reads as what it makes
    """Plain convolutions with strides; the defaults are the network of Mnih et al. 2015."""

    widths: tuple[int, ...] = (32, 64, 64)
    """Planes of each convolution."""
    windows: tuple[tuple[int, int], ...] = ((8, 4), (4, 2), (3, 1))
    """Size and stride of each convolution."""
    dense: int = 512
    """Units of the dense layer at the end."""
    layer_norm: bool = False
    """Normalise each layer before its activation (PQN needs it)."""

    def __post_init__(self):
        if len(self.widths) != len(self.windows):
            raise UserError(f"widths has {len(self.widths)} entries and windows {len(self.windows)}; expected as many.")

    def __call__(self, observation_spec: Any, rngs: nnx.Rngs) -> Convolutional:
        def stages(planes):
            inputs = (planes, *self.widths)
            layers = zip(inputs, self.widths, self.windows)
            return [Conv(i, width, size, stride, "VALID", rngs) for i, width, (size, stride) in layers]

        return Convolutional(observation_spec, stages, self, rngs)


@dataclasses.dataclass(frozen=True)
class resnet:  # a recipe reads as what it makes
    """Residual stages with pooling; the defaults are the large network of Espeholt et al. 2018 without its LSTM."""

    widths: tuple[int, ...] = (16, 32, 32)
    """Planes of each stage: a convolution, pooling by 2, two residual blocks."""
    dense: int = 256
    """Units of the dense layer at the end."""
    layer_norm: bool = False
    """Normalise after each stage and the dense layer (PQN needs it)."""

    def __call__(self, observation_spec: Any, rngs: nnx.Rngs) -> Convolutional:
        def stages(planes):
            return [_Stage(i, width, rngs) for i, width in zip((planes, *self.widths), self.widths)]

        return Convolutional(observation_spec, stages, self, rngs)


def nature() -> cnn:
    """The network of Mnih et al. 2015."""
    return cnn()


def impala_shallow() -> cnn:
    """The small network of Espeholt et al. 2018 (figure 3, left, without the LSTM)."""
    return cnn((16, 32), ((8, 4), (4, 2)), 256)


def impala_resnet() -> resnet:
    """The large network of Espeholt et al. 2018 (figure 3, right, without the LSTM)."""
    return resnet()
