"""PPO: epochs of minibatches on a clipped surrogate (Schulman et al. 2017), discrete and continuous actions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from podracer import learning, mesh, returns
from podracer.agents import actor_critic, decisions
from podracer.agents.common import make_optimizer
from podracer.agents.decisions import Decisions
from podracer.errors import check_number
from podracer.networks import mlp
from podracer.specs import Spec
from podracer.types import Agent, Array


@dataclasses.dataclass(frozen=True)
class Config(actor_critic.ActorCriticConfig):
    """Settings of PPO."""

    epochs: int = 4
    """Passes over each trajectory."""
    minibatches: int = 4
    """Parts that each pass is split into, one gradient step each."""
    clip: float = 0.2
    """How far the probability ratio may move before the gradient stops."""
    gae_lambda: float = 0.95
    """Lambda of the generalised advantage estimate."""
    value_clip: float | None = None
    """How far the value may move before its gradient stops; None: no such clipping."""
    normalize_advantages: bool = True
    """Standardise the advantages of each minibatch."""

    def __post_init__(self):
        super().__post_init__()
        check_number("epochs", self.epochs, minimum=1, whole=True)
        check_number("minibatches", self.minibatches, minimum=1, whole=True)
        check_number("clip", self.clip, minimum=0, exclusive=True)
        check_number("gae_lambda", self.gae_lambda, minimum=0, maximum=1)
        check_number("value_clip", self.value_clip, minimum=0, exclusive=True)


class Targets(NamedTuple):
    """What the loss compares with, per decision."""

    log_prob: Array  # of the action, under the policy that acted
    value: Array  # under the weights that acted
    advantage: Array
    target: Array  # of the value


class Statistics(NamedTuple):
    """Of one minibatch, over all cores."""

    scale: Array  # [] what a sum is multiplied by to be the mean over valid steps
    mean: Array  # [] of the advantages
    inverse_std: Array  # []


def ppo(spec: Spec, config: Config = Config(), network: Callable = mlp()) -> Agent:
    """The agent."""
    rule = make_optimizer(config)

    def update(network, distribution, learner, experience, updates, learning_rate, key, axis_name):
        batch = _batch(network, learner.weights, experience, config)

        def step(learner, minibatch: Decisions, statistics: Statistics):
            def loss(weights):
                return _loss(network, distribution, weights, minibatch, statistics, config)

            return learning.gradient_step(loss, learner, rule, learning_rate, axis_name)

        def statistics(minibatch: Decisions):
            return _statistics(minibatch, config.normalize_advantages, axis_name)

        return learning.minibatch_epochs(step, learner, batch, statistics, key, config.epochs, config.minibatches)

    return actor_critic.build("ppo", spec, config, network, update, lambda config: ppo(spec, config, network))


def _batch(network, weights, experience, config) -> Decisions:
    """Advantages and targets of a trajectory, ready to be shuffled."""

    def evaluate(*sequence):
        return actor_critic.unroll(network, weights, *sequence).value

    values = decisions.values(experience, experience.extras.value, evaluate)
    step = returns.transitions(experience.timestep, values, config.discount)
    advantage = returns.gae(step, config.gae_lambda)
    targets = Targets(experience.extras.log_prob, step.value, advantage, advantage + step.value)
    return decisions.decisions(experience, step.valid, targets, config.minibatches)


def _statistics(minibatch: Decisions, normalize: bool, axis_name: str | None) -> Statistics:
    valid, advantage = minibatch.valid.astype(jnp.float32), minibatch.own.advantage
    # Centred on this core's rough mean first would be more exact; advantages are of order 1, so float32 serves.
    sums = (jnp.sum(valid), jnp.sum(valid * advantage), jnp.sum(valid * advantage**2))
    count, total, square = mesh.total(sums, axis_name)
    count = jnp.maximum(count, 1.0)
    mean = total / count
    inverse_std = jax.lax.rsqrt(jnp.maximum(square / count - mean**2, 0.0) + 1e-8)
    if not normalize:
        mean, inverse_std = jnp.zeros_like(mean), jnp.ones_like(inverse_std)
    return Statistics(mesh.num_cores(axis_name) / count, mean, inverse_std)


def _loss(network, distribution, weights, minibatch: Decisions, statistics: Statistics, config: Config):
    own: Targets = minibatch.own
    seen = minibatch.unroll(lambda *sequence: actor_critic.unroll(network, weights, *sequence))
    weight = minibatch.valid * statistics.scale
    advantage = (own.advantage - statistics.mean) * statistics.inverse_std
    log_ratio = distribution.log_prob(seen.policy, minibatch.action) - own.log_prob
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1.0 - config.clip, 1.0 + config.clip)
    policy_loss = -jnp.sum(weight * jnp.minimum(ratio * advantage, clipped * advantage))
    error = (seen.value - own.target) ** 2
    if config.value_clip is not None:
        change = jnp.clip(seen.value - own.value, -config.value_clip, config.value_clip)
        error = jnp.maximum(error, (own.value + change - own.target) ** 2)
    value_loss = 0.5 * jnp.sum(weight * error)
    entropy = jnp.sum(weight * distribution.entropy(seen.policy))
    loss = policy_loss + config.value_cost * value_loss - config.entropy_cost * entropy
    return loss, {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        # Schulman's low-variance estimate of the divergence from the acting policy.
        "kl": jnp.sum(weight * (ratio - 1.0 - log_ratio)),
        "clip_fraction": jnp.sum(weight * (jnp.abs(ratio - 1.0) > config.clip)),
        "ratio": jnp.sum(weight * ratio),
    }
