"""An environment of any spec: random observations and rewards, episodes that terminate or are cut."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from podracer.envs import api


@dataclasses.dataclass(frozen=True)
class Noise:
    """Terminates with probability 0.1 per step, is cut after 6."""

    spec: api.Spec

    def reset(self, key: jax.Array) -> tuple[Any, Any]:
        return jnp.zeros((), jnp.int32), self._observe(key)

    def step(self, state: Any, action: Any, key: jax.Array) -> tuple[Any, api.Step]:
        observe, end, reward = jax.random.split(key, 3)
        # The action counts, so that nothing of an agent can be left out of the program.
        effect = sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(action))
        return state + 1, api.Step(
            self._observe(observe),
            jax.random.normal(reward) + 0.1 * jnp.tanh(effect),
            jax.random.uniform(end) < 0.1,
            state + 1 >= 6,
        )

    def _observe(self, key: jax.Array) -> Any:
        leaves, structure = jax.tree.flatten(self.spec.observation)
        keys = jax.random.split(key, len(leaves))
        return jax.tree.unflatten(structure, [_draw(*pair) for pair in zip(keys, leaves, strict=True)])


def _draw(key: jax.Array, leaf: api.Array) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jnp.bool_):  # an action mask: something must be legal
        return jax.random.bernoulli(key, 0.5, leaf.shape).at[..., 0].set(True)
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        return jax.random.randint(key, leaf.shape, 0, 255).astype(leaf.dtype)
    return jax.random.normal(key, leaf.shape, leaf.dtype)
