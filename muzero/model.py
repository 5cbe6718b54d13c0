"""MuZero's three functions as one network: representation, dynamics and prediction (Schrittwieser et al. 2020).

    observation --represent--> latent --step(action)--> latent, reward --step(action)--> ...
                                  |                        |
                               predict: policy, value   predict

A multi-layer perceptron for vectors, residual convolutions for pictures and boards. Latents are scaled to [0, 1].
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from podracer.errors import UserError, check_number, unknown
from podracer.networks.atari import Conv, frames
from podracer.networks.mlp import flat_size, flatten, linear
from podracer.networks.policies import policy
from podracer.specs import Action, Continuous, Discrete, Spec, features
from podracer.types import Array


class Heads(NamedTuple):
    """What an agent asks of its network."""

    value_bins: int
    reward_bins: int  # 0: no dynamics and no rewards, the agent steps the environment itself
    projection: bool = False  # for the self-consistency loss


class Prediction(NamedTuple):
    """What the network says of a latent."""

    policy: Array  # [N, P] numbers of the policy: logits, for discrete actions
    value: Array  # [N, value_bins] logits


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


class VectorBody(nnx.Module):
    """Representation and dynamics on vectors: latents [N, width]."""

    def __init__(self, spec: Spec, encoder: Encoder, width: int, depth: int, dynamics: bool, rngs: nnx.Rngs):
        self.shape = (width,)
        self.representation = Layers(flat_size(features(spec.observation)), width, depth, width, 1.0, rngs)
        if dynamics:
            self.dynamics = Layers(width + encoder.size, width, depth, width, 1.0, rngs)

    def represent(self, observation: Any) -> Array:
        return self.representation(flatten(observation))

    def step(self, latent: Array, action: Array) -> Array:
        return latent + self.dynamics(jnp.concatenate([latent, action], -1))


class PictureBody(nnx.Module):
    """Representation and dynamics on pictures and boards: latents [N, height, width, planes].

    Pictures of 32 or more pixels are halved until at most 8 are left on a side; boards keep their size. What an
    observation has beside its picture is added to every place.
    """

    def __init__(self, spec: Spec, encoder: Encoder, width: int, depth: int, dynamics: bool, rngs: nnx.Rngs):
        (picture,), rest = _split(features(spec.observation), 3)
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
        if not dynamics:
            return
        # As many moves as places, and perhaps a pass: the move is a plane with a 1 where the stone goes.
        self.on_board = encoder.size - height * across in (0, 1)
        self.mix = Conv(width + int(self.on_board), width, 3, 1, "SAME", rngs)
        # An action plane per action, tiled with 0 or 1, under a kernel of size 1: one vector for every place.
        self.action = linear(encoder.size, width, math.sqrt(2.0), rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.dynamics = nnx.List([Block(width, rngs) for _ in range(depth)])

    def represent(self, observation: Any) -> Array:
        (picture,), rest = _split(observation, 4)
        images = frames(picture)
        for position, (conv, block) in enumerate(zip(self.entry, self.entry_blocks)):
            images = conv(images)
            if self.beside is not None and position == 0:
                images = images + self.beside(flatten(rest))[:, None, None]
            images = block(jax.nn.relu(images))
        for block in self.blocks:
            images = block(images)
        return images

    def step(self, latent: Array, action: Array) -> Array:
        height, width, _ = self.shape
        images = latent
        if self.on_board:
            place = action[:, : height * width].reshape(-1, height, width, 1)
            images = jnp.concatenate([images, place], -1)
        images = jax.nn.relu(latent + self.norm(self.mix(images) + self.action(action)[:, None, None]))
        for block in self.dynamics:
            images = block(images)
        return images


class Model(nnx.Module):
    """A body with heads; what the agent calls."""

    def __init__(self, spec: Spec, heads: Heads, config: network, rngs: nnx.Rngs):
        self.encoder = action_encoder(spec.action)
        body = PictureBody if config.is_picture(spec) else VectorBody
        self.body = body(spec, self.encoder, config.width, config.depth, heads.reward_bins > 0, rngs)
        size, hidden = math.prod(self.body.shape), config.head_width

        def head(outputs):
            # Small last layers: the first policy is nearly uniform, the first values and rewards are nearly 0.
            return Layers(size, hidden, 1, outputs, 0.01, rngs)

        if heads.reward_bins:
            self.reward_head = head(heads.reward_bins)
        self.value_head = head(heads.value_bins)
        self.continuous = isinstance(spec.action, Continuous)
        self.policy_head = head(policy(spec.action).num_numbers)
        if heads.projection:
            # As in SimSiam (Chen and He 2021) and EfficientZero (Ye et al. 2021, figure 2).
            self.projection = Layers(size, hidden, 1, hidden, 1.0, rngs)
            self.projected = Layers(hidden, hidden, 1, hidden, 1.0, rngs)

    def represent(self, observation: Any) -> Array:
        """The latent [N, ...] of observations [N, ...] without their action mask."""
        return unit(self.body.represent(observation))

    def step(self, latent: Array, action: Any) -> tuple[Array, Array]:
        """`(next latent [N, ...], reward logits [N, reward_bins])` after an action [N, ...]."""
        following = unit(self.body.step(latent, self.encoder.encode(action)))
        return following, self.reward_head(_flat(following))

    def predict(self, latent: Array) -> Prediction:
        """Policy and value logits of a latent."""
        numbers = self.policy_head(_flat(latent))
        return Prediction(bounded(numbers) if self.continuous else numbers, self.value_head(_flat(latent)))

    def project(self, latent: Array, predict: bool) -> Array:
        """What the self-consistency loss compares, [N, P]; `predict` on the side of the dynamics."""
        seen = self.projection(_flat(latent))
        return self.projected(seen) if predict else seen


@dataclasses.dataclass(frozen=True)
class network:  # a recipe reads as what it makes
    """MuZero's network."""

    width: int = 64
    """Units of each layer, or planes of each convolution."""
    depth: int = 1
    """Hidden layers, or residual blocks, of the representation and of the dynamics."""
    head_width: int = 64
    """Units of the hidden layer of each head."""
    kind: Literal["auto", "mlp", "resnet"] = "auto"
    """mlp for vectors, resnet for pictures and boards; auto looks at the observation."""

    def __post_init__(self):
        for name in ("width", "depth", "head_width"):
            check_number(name, getattr(self, name), minimum=1, whole=True)
        if self.kind not in ("auto", "mlp", "resnet"):
            raise unknown("kind", str(self.kind), ("auto", "mlp", "resnet"), "Expected auto, mlp or resnet.")

    def __call__(self, spec: Spec, heads: Heads, rngs: nnx.Rngs) -> Model:
        return Model(spec, heads, self, rngs)

    def is_picture(self, spec: Spec) -> bool:
        """Whether the observation is looked at with convolutions."""
        pictures, _ = _split(features(spec.observation), 3)
        if self.kind == "resnet" and len(pictures) != 1:
            shapes = [leaf.shape for leaf in jax.tree.leaves(features(spec.observation))]
            raise UserError(
                f"{spec.name}: kind is resnet, but observations have the shapes {shapes}; expected one picture, of 3 "
                "axes. Choose kind mlp or auto."
            )
        return self.kind == "resnet" or (self.kind == "auto" and len(pictures) == 1)


def _flat(latent: Array) -> Array:
    return latent.reshape(latent.shape[0], -1)


def _split(observation: Any, axes: int) -> tuple[list, list]:
    """Leaves of `axes` axes, and the others."""
    leaves = jax.tree.leaves(observation)
    return [x for x in leaves if len(x.shape) == axes], [x for x in leaves if len(x.shape) != axes]
