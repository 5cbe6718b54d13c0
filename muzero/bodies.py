"""What MuZero's network is made of: encoded actions, layers, and bodies for vectors and for pictures."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from podracer.networks.atari import Conv, cnn, frames
from podracer.networks.mlp import flat_size, flatten, linear
from podracer.specs import Action, Continuous, Discrete, Spec, features
from podracer.types import Array


class Encoder(NamedTuple):
    """How an action enters the network."""

    size: int  # E
    encode: Callable[[Any], Array]  # action [N, ...] -> float32 [N, E]


def action_encoder(action: Action) -> Encoder:
    """One-hot for discrete actions, several side by side for multi-discrete ones, continuous ones as they are taken.

    The environment clips what is bounded (`envs.batch`), in the agent's units to [-1, 1]; so must the model.
    """
    if isinstance(action, Discrete):
        return Encoder(action.num_values, lambda a: jax.nn.one_hot(a, action.num_values))
    if isinstance(action, Continuous):
        limited = np.isfinite(action.low) & np.isfinite(action.high)
        top = np.where(limited, np.float32(1), np.float32(np.inf))
        return Encoder(action.size, lambda a: jnp.clip(a, *(jnp.broadcast_to(x, a.shape) for x in (-top, top))))
    sizes = action.num_values

    def encode(a):
        return jnp.concatenate([jax.nn.one_hot(a[..., i], size) for i, size in enumerate(sizes)], -1)

    return Encoder(sum(sizes), encode)


def unit(latent: Array) -> Array:
    """Each latent [N, ...] scaled to [0, 1] over all its numbers (appendix G): as large as an encoded action."""
    axes = tuple(range(1, latent.ndim))
    low, high = jnp.min(latent, axes, keepdims=True), jnp.max(latent, axes, keepdims=True)
    return (latent - low) / jnp.maximum(high - low, 1e-5)


def bounded(numbers: Array) -> Array:
    """Means and log standard deviations [N, 2 D], the latter softly between -3 and 0.5.

    What is trained towards the best of a few samples of its own narrows until all samples are alike; so narrow that a
    search cannot tell them apart, it would never widen again.
    """
    low, high = -3.0, 0.5
    mean, log_std = jnp.split(numbers, 2, -1)
    log_std = high - jax.nn.softplus(high - log_std)
    return jnp.concatenate([mean, low + jax.nn.softplus(log_std - low)], -1)


class Layers(nnx.Module):
    """Dense layers of equal width, each with a layer norm and a relu, then a linear one."""

    def __init__(self, inputs: int, width: int, depth: int, outputs: int, scale: float, rngs: nnx.Rngs):
        sizes = [inputs, *[width] * depth]
        self.layers = nnx.List([linear(size, width, math.sqrt(2.0), rngs) for size in sizes[:-1]])
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in sizes[:-1]])
        self.last = linear(sizes[-1], outputs, scale, rngs)

    def __call__(self, inputs: Array) -> Array:
        for layer, norm in zip(self.layers, self.norms):
            inputs = jax.nn.relu(norm(layer(inputs)))
        return self.last(inputs)


class Block(nnx.Module):
    """conv, norm, relu, conv, norm, plus the input, relu."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.convs = nnx.List([Conv(width, width, 3, 1, "SAME", rngs) for _ in range(2)])
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])

    def __call__(self, images: Array) -> Array:
        seen = jax.nn.relu(self.norms[0](self.convs[0](images)))
        return jax.nn.relu(images + self.norms[1](self.convs[1](seen)))


class VectorDynamics(nnx.Module):
    """From a latent [N, width] to the next."""

    def __init__(self, width: int, depth: int, inputs: int, rngs: nnx.Rngs):
        self.layers = Layers(width + inputs, width, depth, width, 1.0, rngs)

    def __call__(self, latent: Array, moved_by: Array) -> Array:
        return latent + self.layers(jnp.concatenate([latent, moved_by], -1))


class Flat(nnx.Module):
    """Layers over all numbers of an observation."""

    def __init__(self, spec: Spec, width: int, depth: int, rngs: nnx.Rngs):
        self.layers = Layers(flat_size(features(spec.observation)), width, depth, width, 1.0, rngs)

    def __call__(self, observation: Any) -> Array:
        return self.layers(flatten(observation))


class Seen(nnx.Module):
    """A convolutional trunk, and a linear layer."""

    def __init__(self, spec: Spec, trunk: cnn, width: int, rngs: nnx.Rngs):
        self.trunk = trunk(features(spec.observation), rngs)
        self.last = linear(trunk.dense, width, 1.0, rngs)

    def __call__(self, observation: Any) -> Array:
        return self.last(self.trunk(observation))


class VectorBody(nnx.Module):
    """Latents [N, width], from a representation of one's own."""

    def __init__(self, representation: nnx.Module, encoder: Encoder, width: int, depth: int, dynamics: bool, rngs):
        self.shape = (width,)
        self.representation = representation
        self.depth = depth
        if dynamics:
            self.dynamics = self.another(encoder.size, rngs)

    def another(self, inputs: int, rngs: nnx.Rngs) -> VectorDynamics:
        """New dynamics, moved by vectors [N, inputs]."""
        return VectorDynamics(*self.shape, self.depth, inputs, rngs)

    def represent(self, observation: Any) -> Array:
        return self.representation(observation)


class PictureDynamics(nnx.Module):
    """From a latent [N, height, width, planes] to the next."""

    def __init__(self, shape: tuple[int, int, int], depth: int, inputs: int, rngs: nnx.Rngs):
        self.shape = shape
        height, across, width = shape
        # As many moves as places, and perhaps a pass: the move is a plane with a 1 where the stone goes.
        self.on_board = inputs - height * across in (0, 1)
        self.mix = Conv(width + int(self.on_board), width, 3, 1, "SAME", rngs)
        # An action plane per action, tiled with 0 or 1, under a kernel of size 1: one vector for every place.
        self.action = linear(inputs, width, math.sqrt(2.0), rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(depth)])

    def __call__(self, latent: Array, moved_by: Array) -> Array:
        height, width, _ = self.shape
        images = latent
        if self.on_board:
            place = moved_by[:, : height * width].reshape(-1, height, width, 1)
            images = jnp.concatenate([images, place], -1)
        images = jax.nn.relu(latent + self.norm(self.mix(images) + self.action(moved_by)[:, None, None]))
        for block in self.blocks:
            images = block(images)
        return images


class PictureBody(nnx.Module):
    """Representation and dynamics on pictures and boards: latents [N, height, width, planes].

    Pictures of 32 or more pixels are halved until at most 8 are left on a side; boards keep their size. What an
    observation has beside its picture is added to every place.
    """

    def __init__(self, spec: Spec, encoder: Encoder, width: int, depth: int, dynamics: bool, rngs: nnx.Rngs):
        (picture,), rest = split(features(spec.observation), 3)
        probe = jax.ShapeDtypeStruct((1, *picture.shape), picture.dtype)
        _, height, across, planes = jax.eval_shape(frames, probe).shape
        self.entry, self.entry_blocks = nnx.List([]), nnx.List([])
        while not self.entry or max(height, across) > 8:
            stride = 2 if self.entry or max(height, across) >= 32 else 1
            self.entry.append(Conv(planes, width, 3, stride, "SAME", rngs))
            self.entry_blocks.append(Block(width, rngs))
            height, across, planes = -(-height // stride), -(-across // stride), width
            if stride == 1:
                break
        self.shape = (height, across, width)
        self.beside = linear(flat_size(rest), width, 1.0, rngs) if rest else None
        self.blocks = nnx.List([Block(width, rngs) for _ in range(depth)])
        self.depth = depth
        if dynamics:
            self.dynamics = self.another(encoder.size, rngs)

    def another(self, inputs: int, rngs: nnx.Rngs) -> PictureDynamics:
        """New dynamics, moved by vectors [N, inputs]."""
        return PictureDynamics(self.shape, self.depth, inputs, rngs)

    def represent(self, observation: Any) -> Array:
        (picture,), rest = split(observation, 4)
        images = frames(picture)
        for position, (conv, block) in enumerate(zip(self.entry, self.entry_blocks)):
            images = conv(images)
            if self.beside is not None and position == 0:
                images = images + self.beside(flatten(rest))[:, None, None]
            images = block(jax.nn.relu(images))
        for block in self.blocks:
            images = block(images)
        return images


def split(observation: Any, axes: int) -> tuple[list, list]:
    """Leaves of `axes` axes, and the others."""
    leaves = jax.tree.leaves(observation)
    return [x for x in leaves if len(x.shape) == axes], [x for x in leaves if len(x.shape) != axes]


def flat(latent: Array) -> Array:
    return latent.reshape(latent.shape[0], -1)
