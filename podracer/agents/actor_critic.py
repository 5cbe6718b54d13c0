"""What A2C, PPO and IMPALA share: one stochastic policy and one value, on any network."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from podracer.agents.common import CommonConfig, assemble
from podracer.errors import check_number
from podracer.networks.heads import ActorCritic, PolicyValue
from podracer.networks.policies import Policy, policy
from podracer.specs import Spec
from podracer.types import Agent, Array


@dataclasses.dataclass(frozen=True)
class ActorCriticConfig(CommonConfig):
    """Settings of every actor-critic."""

    entropy_cost: float = 0.01
    """Weight of the entropy bonus."""
    value_cost: float = 0.5
    """Weight of the value loss."""
    shared_trunk: bool = False
    """Policy and value on one trunk instead of one each."""

    def __post_init__(self):
        super().__post_init__()
        check_number("entropy_cost", self.entropy_cost, minimum=0)
        check_number("value_cost", self.value_cost, minimum=0)


class Behaviour(NamedTuple):
    """What an actor-critic notes of each decision."""

    log_prob: Array  # [B] of the action, under the policy that chose it
    value: Array  # [B]


def build(
    name: str, spec: Spec, config: ActorCriticConfig, network: Callable, update: Callable, rebuild: Callable
) -> Agent:
    """An actor-critic agent whose learning is `update` (see `common.assemble`, plus the policy as second argument)."""
    distribution = policy(spec.action)

    def act(outputs: PolicyValue, updates, key):
        action = distribution.sample(key, outputs.policy)
        return action, Behaviour(distribution.log_prob(outputs.policy, action), outputs.value)

    return assemble(
        name,
        spec,
        config,
        recipe=network,
        build_network=lambda rngs: ActorCritic(spec, network, config.shared_trunk, rngs),
        act=act,
        greedy=lambda outputs: distribution.mode(outputs.policy),
        update=lambda network, *args: update(network, distribution, *args),
        rebuild=rebuild,
    )


def unroll(network: Any, weights: Any, observation: Any, first: Array, state: Any) -> PolicyValue:
    """`PolicyValue` [T, B, ...] of a sequence."""
    return network.apply(weights, lambda module, *args: module.unroll(*args)[0], observation, first, state)


def policy_and_value_loss(
    distribution: Policy,
    numbers: Array,
    value: Array,
    action: Any,
    advantage: Array,
    target: Array,
    weights: Array,
    config: ActorCriticConfig,
):
    """The plain actor-critic loss of A2C and IMPALA, all arguments [T, B, ...]; `weights` from `mean_weights`.

    policy gradient + value_cost * half squared error - entropy_cost * entropy.
    """
    log_prob = distribution.log_prob(numbers, action)
    policy_loss = -jnp.sum(weights * advantage * log_prob)
    value_loss = 0.5 * jnp.sum(weights * (target - value) ** 2)
    entropy = jnp.sum(weights * distribution.entropy(numbers))
    loss = policy_loss + config.value_cost * value_loss - config.entropy_cost * entropy
    return loss, {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
