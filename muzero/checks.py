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
    """Refuse a network that lacks a method, or whose outputs have the wrong shapes, naming it.

    Raises:
      UserError: a method is missing, or a shape is wrong.
    """
    size = 2
    observation = jax.tree.map(lambda leaf: jnp.zeros((size, *leaf.shape), leaf.dtype), features(spec.observation))
    action = jnp.broadcast_to(blank_action(spec.action), (size, *blank_action(spec.action).shape))

    def run(module):
        methods = ["represent", "predict", *(["project"] if heads.projection else [])]
        methods += ["afterstate", "happen", "encode"] if heads.outcomes else ["step"] if heads.reward_bins else []
        for method in methods:
            if not callable(getattr(module, method, None)):
                raise UserError(
                    f"{name}: the network {type(module).__name__} has no method {method}; expected "
                    f"{', '.join(methods)}. Add it, or choose --network muzero."
                )
        latent = module.represent(observation)
        seen = module.predict(latent)
        outputs = {
            "the policy": (seen.policy, (size, policy(spec.action).num_numbers)),
            "the value": (seen.value, (size, heads.value_bins)),
        }
        moved = None
        if heads.outcomes:
            after, said = module.afterstate(latent, action)
            outputs["the value of an afterstate"] = said.value, (size, heads.value_bins)
            outputs["the policy of chance"] = said.outcome, (size, heads.outcomes)
            outputs["the code of chance"] = module.encode(latent, latent), (size, heads.outcomes)
            moved = module.happen(after, jax.nn.one_hot(jnp.zeros(size, jnp.int32), heads.outcomes))
        elif heads.reward_bins:
            moved = module.step(latent, action)
        if moved is not None:
            outputs["the latent after a step"] = moved[0], latent.shape
            outputs["the reward after a step"] = moved[1], (size, heads.reward_bins)
        for what, (got, shape) in outputs.items():
            if got.shape != shape:
                raise UserError(
                    f"{name}: {what} has the shape {list(got.shape)}; expected {list(shape)}. Change the network."
                )

    jax.eval_shape(lambda key: network.apply(network.init(key), run), _key())


def _key() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0))
