"""Trunks with a memory: any feed-forward trunk, then an LSTM or a GRU whose state is reset where an episode starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from podracer.networks.functional import only_parameters
from podracer.networks.mlp import mlp


def reset_where(first: jax.Array, state: Any) -> Any:
    """Zero recurrent state [B, ...] where `first` [B]."""
    return jax.tree.map(lambda leaf: jnp.where(first[:, None], 0.0, leaf), state)


class Recurrent(nnx.Module):
    """A feed-forward trunk followed by a recurrent cell."""

    def __init__(self, observation_spec: Any, config: recurrent, rngs: nnx.Rngs):
        self.trunk = config.trunk(observation_spec, rngs)
        only_parameters(self.trunk)
        probe = jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape), leaf.dtype), observation_spec)
        inputs = jax.eval_shape(self.trunk, probe).shape[-1]
        cell = {"lstm": nnx.OptimizedLSTMCell, "gru": nnx.GRUCell}[config.cell]
        self.cell = cell(inputs, config.size, rngs=nnx.Rngs(rngs.params()))
        # Cells keep a stream for the initial carry; theirs is zeros, so the stream must not become state.
        if hasattr(self.cell, "rngs"):
            del self.cell.rngs
        self.kind, self.size = config.cell, config.size

    def initial_state(self, batch_size: int) -> Any:
        """Zeros: [B, size] for a GRU, two of them for an LSTM."""
        zeros = jnp.zeros((batch_size, self.size), jnp.float32)
        return (zeros, zeros) if self.kind == "lstm" else zeros

    def unroll(self, observation: Any, first: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """Features [T, B, size] of a sequence, and the state after it. `first` [T, B] resets the state."""
        length, batch_size = first.shape
        flat = jax.tree.map(lambda leaf: leaf.reshape(length * batch_size, *leaf.shape[2:]), observation)
        inputs = self.trunk(flat).reshape(length, batch_size, -1)

        def step(state, step_inputs):
            features, first = step_inputs
            return self.cell(reset_where(first, state), features)

        state, outputs = jax.lax.scan(step, state, (inputs, first))
        return outputs, state


@dataclasses.dataclass(frozen=True)
class recurrent:  # a recipe reads as what it makes
    """An LSTM or GRU on top of a feed-forward trunk."""

    cell: Literal["lstm", "gru"] = "lstm"
    """Which cell."""
    size: int = 64
    """Units of the cell."""
    trunk: Any = mlp()
    """What the cell reads: any feed-forward recipe."""

    def __call__(self, observation_spec: Any, rngs: nnx.Rngs) -> Recurrent:
        return Recurrent(observation_spec, self, rngs)


def lstm(size: int = 64, trunk: Callable = mlp()) -> recurrent:
    """An LSTM of `size` units on `trunk`."""
    return recurrent("lstm", size, trunk)


def gru(size: int = 64, trunk: Callable = mlp()) -> recurrent:
    """A GRU of `size` units on `trunk`."""
    return recurrent("gru", size, trunk)
