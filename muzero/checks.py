"""What a network must be before MuZero can plan with it; asked once, without computing anything."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from muzero.model import Heads
from muzero.sampling import blank_action
from podracer.errors import UserError
from podracer.networks.functional import Functional
from podracer.networks.policies import policy
from podracer.specs import Discrete, Spec, features


def check_actions(name: str, spec: Spec) -> int:
    """The number of actions.

    Raises:
      UserError: they are not discrete.
    """
    if not isinstance(spec.action, Discrete):
        raise UserError(
            f"{name} cannot drive {spec.name}: its actions are {type(spec.action).__name__}; expected Discrete. "
            "Choose ppo, a2c, impala or sampled-muzero."
        )
    return spec.action.num_values


def check_model(name: str, spec: Spec, heads: Heads, network: Functional) -> None:
    """Refuse a network whose outputs have the wrong shapes, naming the output.

    Raises:
      UserError: a shape is wrong.
    """
    size = 2
    observation = jax.tree.map(lambda leaf: jnp.zeros((size, *leaf.shape), leaf.dtype), features(spec.observation))

    action = jnp.broadcast_to(blank_action(spec.action), (size, *blank_action(spec.action).shape))

    def run(module):
        latent = module.represent(observation)
        stepped = module.step(latent, action) if heads.reward_bins and not heads.outcomes else None
        return latent, stepped, module.predict(latent)

    latent, stepped, seen = jax.eval_shape(lambda key: network.apply(network.init(key), run), _key())
    wanted = {}
    if stepped is not None:
        following, reward = stepped
        wanted["the latent after a step"] = following.shape, latent.shape
        wanted["the reward after a step"] = reward.shape, (size, heads.reward_bins)
    wanted |= {
        "the policy": (seen.policy.shape, (size, policy(spec.action).num_numbers)),
        "the value": (seen.value.shape, (size, heads.value_bins)),
    }
    for what, (got, expected) in wanted.items():
        if got != expected:
            raise UserError(f"{name}: {what} has the shape {list(got)}; expected {list(expected)}. Change the network.")


def _key() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0))
