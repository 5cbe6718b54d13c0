"""IMPALA: an actor-critic whose targets correct for the lag of the actors, by V-trace (Espeholt et al. 2018)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from podracer import learning, returns
from podracer.agents import actor_critic
from podracer.agents.common import make_optimizer
from podracer.errors import check_number
from podracer.networks import mlp
from podracer.specs import Spec
from podracer.types import Agent


@dataclasses.dataclass(frozen=True)
class Config(actor_critic.ActorCriticConfig):
    """Settings of IMPALA."""

    vtrace_lambda: float = 1.0
    """Mixes n-step targets of different lengths; 1 is the paper's."""
    clip_rho: float = 1.0
    """Upper bound of the importance weight in the value target."""
    clip_pg_rho: float = 1.0
    """Upper bound of the importance weight in the policy gradient."""

    def __post_init__(self):
        super().__post_init__()
        check_number("vtrace_lambda", self.vtrace_lambda, minimum=0, maximum=1)
        check_number("clip_rho", self.clip_rho, minimum=0, exclusive=True)
        check_number("clip_pg_rho", self.clip_pg_rho, minimum=0, exclusive=True)


def impala(spec: Spec, config: Config = Config(), network: Callable = mlp()) -> Agent:
    """The agent: one gradient step per trajectory, V-trace targets and advantages."""
    rule = make_optimizer(config)

    def update(network, distribution, learner, experience, updates, learning_rate, key, axis_name):
        timestep = experience.timestep
        weights_of_mean = learning.mean_weights(timestep.valid[1:], axis_name)

        def loss(weights):
            seen = actor_critic.unroll(
                network, weights, experience.observation, timestep.first, experience.network_state
            )
            numbers, values = seen.policy[:-1], jax.lax.stop_gradient(seen.value)
            log_prob = jax.lax.stop_gradient(distribution.log_prob(numbers, experience.action))
            log_rho = log_prob - experience.extras.log_prob
            step = returns.transitions(timestep, values, config.discount)
            out = returns.vtrace(step, log_rho, config.vtrace_lambda, config.clip_rho, config.clip_pg_rho)
            value, metrics = actor_critic.policy_and_value_loss(
                distribution,
                numbers,
                seen.value[:-1],
                experience.action,
                out.advantage,
                out.target,
                weights_of_mean,
                config,
            )
            return value, {**metrics, "rho": jnp.sum(weights_of_mean * jnp.exp(log_rho))}

        return learning.gradient_step(loss, learner, rule, learning_rate, axis_name)

    return actor_critic.build("impala", spec, config, network, update, lambda config: impala(spec, config, network))
