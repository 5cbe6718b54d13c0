"""A2C: advantage actor-critic with n-step returns (Mnih et al. 2016, synchronous)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax

from podracer import learning, returns
from podracer.agents import actor_critic
from podracer.agents.common import make_optimizer
from podracer.errors import check_number
from podracer.networks import mlp
from podracer.specs import Spec
from podracer.types import Agent


@dataclasses.dataclass(frozen=True)
class Config(actor_critic.ActorCriticConfig):
    """Settings of A2C."""

    n_step: int | None = None
    """Rewards added up before the value takes over; None: to the end of the unroll."""

    def __post_init__(self):
        super().__post_init__()
        check_number("n_step", self.n_step, minimum=1, whole=True)


def a2c(spec: Spec, config: Config = Config(), network: Callable = mlp()) -> Agent:
    """The agent: one gradient step per trajectory, advantages from n-step returns."""
    rule = make_optimizer(config)

    def update(network, distribution, learner, experience, updates, learning_rate, key, axis_name):
        timestep = experience.timestep
        weights_of_mean = learning.mean_weights(timestep.valid[1:], axis_name)

        def loss(weights):
            seen = actor_critic.unroll(
                network, weights, experience.observation, timestep.first, experience.network_state
            )
            values = jax.lax.stop_gradient(seen.value)
            step = returns.transitions(timestep, values, config.discount)
            target = returns.n_step_returns(step, config.n_step or step.reward.shape[0])
            return actor_critic.policy_and_value_loss(
                distribution,
                seen.policy[:-1],
                seen.value[:-1],
                experience.action,
                target - values[:-1],
                target,
                weights_of_mean,
                config,
            )

        return learning.gradient_step(loss, learner, rule, learning_rate, axis_name)

    return actor_critic.build("a2c", spec, config, network, update, lambda config: a2c(spec, config, network))
