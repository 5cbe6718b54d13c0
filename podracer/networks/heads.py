"""Trunks with heads: what agents evaluate. Two ways in: `act` for one time step [B], `unroll` for a sequence [T, B]."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from podracer import mesh
from podracer.networks.functional import only_parameters
from podracer.networks.mlp import linear
from podracer.networks.policies import mask_logits, policy
from podracer.specs import Continuous, Discrete, Spec, action_mask, features


class PolicyValue(NamedTuple):
    """What an actor-critic says of an observation."""

    policy: jax.Array  # [..., P] numbers of the policy's distribution
    value: jax.Array  # [...]


class Trunk(nnx.Module):
    """A user's or our own trunk, recurrent or not, under one calling convention."""

    def __init__(self, spec: Spec, recipe: Any, rngs: nnx.Rngs):
        self.body = recipe(features(spec.observation), rngs)
        only_parameters(self.body)
        probe = jax.tree.map(lambda leaf: jnp.zeros((1, 1, *leaf.shape), leaf.dtype), features(spec.observation))
        first = jnp.zeros((1, 1), bool)
        self.size = jax.eval_shape(lambda: self.unroll(probe, first, self.initial_state(1))[0]).shape[-1]

    def initial_state(self, batch_size: int) -> Any:
        return self.body.initial_state(batch_size) if hasattr(self.body, "initial_state") else ()

    def unroll(self, observation: Any, first: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """Features [T, B, size] and the state after the sequence."""
        if hasattr(self.body, "unroll"):
            return self.body.unroll(observation, first, state)
        # One large matrix product instead of T small ones.
        flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), observation)
        return self.body(flat).reshape(*first.shape, -1), state


def head(layer: nnx.Linear, inputs: jax.Array) -> jax.Array:
    """`layer(inputs)`, in the form that the platform is quickest at.

    On a CPU the gradient of a matrix product with few columns spends its time on packing the operands. Up to 6 outputs
    are computed as one matrix-vector product each.
    """
    if mesh.platform() != "cpu" or layer.out_features > 6:
        return layer(inputs)
    assert layer.bias is not None
    columns = [inputs @ layer.kernel[..., i] + layer.bias[i] for i in range(layer.out_features)]
    return jnp.stack(columns, -1)


class _Heads(nnx.Module):
    """What ActorCritic and QNetwork share: one step is a sequence of length 1."""

    def unroll(self, observation: Any, first: jax.Array, state: Any) -> tuple[Any, Any]:
        """Outputs [T, B, ...] of a sequence, and the state after it."""
        raise NotImplementedError

    def act(self, observation: Any, first: jax.Array, state: Any) -> tuple[Any, Any]:
        """Outputs [B, ...] of one time step, and the next state."""
        observation, first = jax.tree.map(lambda leaf: leaf[None], (observation, first))
        outputs, state = self.unroll(observation, first, state)
        return jax.tree.map(lambda leaf: leaf[0], outputs), state


class ActorCritic(_Heads):
    """Policy and value heads, on one trunk or on one each."""

    def __init__(self, spec: Spec, recipe: Any, shared: bool, rngs: nnx.Rngs):
        self.trunks = nnx.List([Trunk(spec, recipe, rngs) for _ in range(1 if shared else 2)])
        self.continuous = isinstance(spec.action, Continuous)
        outputs = spec.action.size if isinstance(spec.action, Continuous) else policy(spec.action).num_numbers
        # A small last layer makes the first policy nearly uniform, the usual choice since Schulman et al. 2017.
        self.policy_head = linear(self.trunks[0].size, outputs, 0.01, rngs)
        self.value_head = linear(self.trunks[-1].size, 1, 1.0, rngs)
        if self.continuous:
            self.log_std = nnx.Param(jnp.zeros(outputs))

    def initial_state(self, batch_size: int) -> Any:
        return tuple(trunk.initial_state(batch_size) for trunk in self.trunks)

    def unroll(self, observation: Any, first: jax.Array, state: Any) -> tuple[PolicyValue, Any]:
        """`PolicyValue` [T, B, ...] of a sequence, and the state after it."""
        seen = features(observation)
        outputs = [trunk.unroll(seen, first, part) for trunk, part in zip(self.trunks, state, strict=True)]
        numbers = head(self.policy_head, outputs[0][0])
        if self.continuous:
            numbers = jnp.concatenate([numbers, jnp.broadcast_to(self.log_std[...], numbers.shape)], -1)
        else:
            numbers = mask_logits(numbers, action_mask(observation))
        value = self.value_head(outputs[-1][0])[..., 0]
        return PolicyValue(numbers, value), tuple(part for _, part in outputs)


class QNetwork(_Heads):
    """One value per action; illegal actions have the value of a lost cause."""

    def __init__(self, spec: Spec, recipe: Any, rngs: nnx.Rngs):
        assert isinstance(spec.action, Discrete)
        self.trunk = Trunk(spec, recipe, rngs)
        self.head = linear(self.trunk.size, spec.action.num_values, 1.0, rngs)

    def initial_state(self, batch_size: int) -> Any:
        return self.trunk.initial_state(batch_size)

    def unroll(self, observation: Any, first: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """Q values [T, B, A] of a sequence, and the state after it."""
        seen, state = self.trunk.unroll(features(observation), first, state)
        return mask_logits(head(self.head, seen), action_mask(observation)), state
