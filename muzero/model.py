"""MuZero's three functions as one network: representation, dynamics and prediction (Schrittwieser et al. 2020).

    observation --represent--> latent --step(action)--> latent, reward --step(action)--> ...
                                  |                        |
                               predict: policy, value   predict

A multi-layer perceptron for vectors, residual convolutions for pictures and boards (`muzero.bodies`). Latents are
scaled to [0, 1]. Where chance moves, too, a step has two halves: see `muzero.chance`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
from flax import nnx

from muzero.bodies import (
    Encoder,
    Flat,
    Layers,
    PictureBody,
    Seen,
    VectorBody,
    action_encoder,
    bounded,
    flat,
    split,
    unit,
)
from muzero.chance import Afterstate, Outcomes
from podracer.errors import UserError, check_number, unknown
from podracer.networks.atari import cnn
from podracer.networks.policies import policy
from podracer.specs import Continuous, Spec, features
from podracer.types import Array

KINDS = ("auto", "mlp", "resnet", "cnn")


class Heads(NamedTuple):
    """What an agent asks of its network."""

    value_bins: int
    reward_bins: int  # 0: no dynamics and no rewards, the agent steps the environment itself
    projection: bool = False  # for the self-consistency loss
    outcomes: int = 0  # M, of chance after each action; 0: chance makes no moves


class Prediction(NamedTuple):
    """What the network says of a latent."""

    policy: Array  # [N, P] numbers of the policy: logits, for discrete actions
    value: Array  # [N, value_bins] logits


class Model(nnx.Module):
    """A body with heads; what the agent calls."""

    def __init__(self, spec: Spec, heads: Heads, config: network, rngs: nnx.Rngs):
        self.encoder = action_encoder(spec.action)
        self.body = config.body(spec, self.encoder, heads.reward_bins > 0, rngs)
        size, hidden = math.prod(self.body.shape), config.head_width

        def head(outputs):
            # Small last layers: the first policy is nearly uniform, the first values and rewards are nearly 0.
            return Layers(size, hidden, 1, outputs, 0.01, rngs)

        if heads.reward_bins:
            self.reward_head = head(heads.reward_bins)
        self.value_head = head(heads.value_bins)
        self.continuous = isinstance(spec.action, Continuous)
        self.policy_head = head(policy(spec.action).num_numbers)
        if heads.outcomes:
            self.outcomes = Outcomes(self.body, heads, hidden, rngs)
        if heads.projection:
            # As in SimSiam (Chen and He 2021) and EfficientZero (Ye et al. 2021, figure 2).
            self.projection = Layers(size, hidden, 1, hidden, 1.0, rngs)
            self.projected = Layers(hidden, hidden, 1, hidden, 1.0, rngs)

    def represent(self, observation: Any) -> Array:
        """The latent [N, ...] of observations [N, ...] without their action mask."""
        return unit(self.body.represent(observation))

    def step(self, latent: Array, action: Any) -> tuple[Array, Array]:
        """`(next latent [N, ...], reward logits [N, reward_bins])` after an action [N, ...]."""
        following = unit(self.body.dynamics(latent, self.encoder.encode(action)))
        return following, self.reward_head(flat(following))

    def afterstate(self, latent: Array, action: Any) -> tuple[Array, Afterstate]:
        """`(afterstate [N, ...], what is said of it)` after an action [N, ...], before chance has moved."""
        after = unit(self.body.dynamics(latent, self.encoder.encode(action)))
        return after, self.outcomes.judge(after)

    def happen(self, afterstate: Array, code: Array) -> tuple[Array, Array]:
        """`(next latent [N, ...], reward logits [N, reward_bins])` after outcomes, one-hot [N, M]."""
        following = self.outcomes.follow(afterstate, code)
        return following, self.reward_head(flat(following))

    def encode(self, before: Array, after: Array) -> Array:
        """[N, M] numbers, the greatest says what chance did between two observed latents."""
        return self.outcomes.encode(before, after)

    def predict(self, latent: Array) -> Prediction:
        """Policy and value logits of a latent."""
        numbers = self.policy_head(flat(latent))
        return Prediction(bounded(numbers) if self.continuous else numbers, self.value_head(flat(latent)))

    def project(self, latent: Array, predict: bool) -> Array:
        """What the self-consistency loss compares, [N, P]; `predict` on the side of the dynamics."""
        seen = self.projection(flat(latent))
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
    kind: Literal["auto", "mlp", "resnet", "cnn"] = "auto"
    """mlp for vectors, resnet for pictures and boards; auto looks at the observation. cnn looks at a picture through
    `trunk` and goes on as mlp, which is cheaper."""
    trunk: cnn = cnn()
    """The convolutions of cnn."""

    def __post_init__(self):
        for name in ("width", "depth", "head_width"):
            check_number(name, getattr(self, name), minimum=1, whole=True)
        if self.kind not in KINDS:
            raise unknown("kind", str(self.kind), KINDS, f"Expected {', '.join(KINDS[:-1])} or {KINDS[-1]}.")

    def __call__(self, spec: Spec, heads: Heads, rngs: nnx.Rngs) -> Model:
        return Model(spec, heads, self, rngs)

    def body(self, spec: Spec, encoder: Encoder, dynamics: bool, rngs: nnx.Rngs) -> PictureBody | VectorBody:
        """What represents observations and moves latents."""
        pictures, _ = split(features(spec.observation), 3)
        if self.kind in ("resnet", "cnn") and len(pictures) != 1:
            shapes = [leaf.shape for leaf in jax.tree.leaves(features(spec.observation))]
            raise UserError(
                f"{spec.name}: kind is {self.kind}, but observations have the shapes {shapes}; expected one picture, "
                "of 3 axes. Choose kind mlp or auto."
            )
        width, depth = self.width, self.depth
        if self.kind == "resnet" or (self.kind == "auto" and len(pictures) == 1):
            return PictureBody(spec, encoder, width, depth, dynamics, rngs)
        seen = Seen(spec, self.trunk, width, rngs) if self.kind == "cnn" else Flat(spec, width, depth, rngs)
        return VectorBody(seen, encoder, width, depth, dynamics, rngs)
