"""PPO: epochs of minibatches on a clipped surrogate (Schulman et al. 2017), discrete and continuous actions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podracer import learning, mesh, returns
from podracer.agents import actor_critic
from podracer.agents.common import make_optimizer
from podracer.errors import check_divides, check_number
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


class Batch(NamedTuple):
    """What the epochs shuffle. [T, B] with a recurrent network, else [1, T * B]."""

    observation: Any
    first: Array
    action: Any
    log_prob: Array
    value: Array
    advantage: Array
    target: Array
    valid: Array
    network_state: Any  # [1, B, ...]


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
        check_divides(
            "the number of environments per core" if batch.first.shape[0] > 1 else "batch x unroll_length",
            batch.first.shape[1],
            "minibatches",
            config.minibatches,
        )

        def step(learner, minibatch: Batch, statistics: Statistics):
            def loss(weights):
                return _loss(network, distribution, weights, minibatch, statistics, config)

            return learning.gradient_step(loss, learner, rule, learning_rate, axis_name)

        def statistics(minibatch: Batch):
            return _statistics(minibatch, config.normalize_advantages, axis_name)

        return learning.minibatch_epochs(step, learner, batch, statistics, key, config.epochs, config.minibatches)

    return actor_critic.build("ppo", spec, config, network, update, lambda config: ppo(spec, config, network))


def _batch(network, weights, experience, config) -> Batch:
    """Advantages and targets of a trajectory, ready to be shuffled."""
    timestep = experience.timestep
    if jax.tree.leaves(experience.network_state):
        values = actor_critic.unroll(
            network, weights, experience.observation, timestep.first, experience.network_state
        ).value
    else:
        # The actor's own values serve; only the last observation has none yet.
        last = jax.tree.map(lambda leaf: leaf[-1:], experience.observation)
        bootstrap = actor_critic.unroll(network, weights, last, timestep.first[-1:], experience.network_state).value
        values = jnp.concatenate([experience.extras.value, bootstrap])
    step = returns.transitions(timestep, values, config.discount)
    advantage = returns.gae(step, config.gae_lambda)
    batch = Batch(
        observation=jax.tree.map(lambda leaf: leaf[:-1], experience.observation),
        first=timestep.first[:-1],
        action=experience.action,
        log_prob=experience.extras.log_prob,
        value=step.value,
        advantage=advantage,
        target=advantage + step.value,
        valid=step.valid,
        network_state=jax.tree.map(lambda leaf: leaf[None], experience.network_state),
    )
    if jax.tree.leaves(experience.network_state):
        return batch
    # Without a memory every step stands alone, and all T * B of them are shuffled.
    return jax.tree.map(lambda leaf: leaf.reshape(1, -1, *leaf.shape[2:]), batch)


def _statistics(minibatch: Batch, normalize: bool, axis_name: str | None) -> Statistics:
    valid = minibatch.valid.astype(jnp.float32)
    # Centred on this core's rough mean first would be more exact; advantages are of order 1, so float32 serves.
    sums = (jnp.sum(valid), jnp.sum(valid * minibatch.advantage), jnp.sum(valid * minibatch.advantage**2))
    count, total, square = mesh.total(sums, axis_name)
    count = jnp.maximum(count, 1.0)
    mean = total / count
    inverse_std = jax.lax.rsqrt(jnp.maximum(square / count - mean**2, 0.0) + 1e-8)
    if not normalize:
        mean, inverse_std = jnp.zeros_like(mean), jnp.ones_like(inverse_std)
    return Statistics(mesh.num_cores(axis_name) / count, mean, inverse_std)


def _loss(network, distribution, weights, minibatch: Batch, statistics: Statistics, config: Config):
    state = jax.tree.map(lambda leaf: leaf[0], minibatch.network_state)
    seen = actor_critic.unroll(network, weights, minibatch.observation, minibatch.first, state)
    weight = minibatch.valid * statistics.scale
    advantage = (minibatch.advantage - statistics.mean) * statistics.inverse_std
    log_ratio = distribution.log_prob(seen.policy, minibatch.action) - minibatch.log_prob
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1.0 - config.clip, 1.0 + config.clip)
    policy_loss = -jnp.sum(weight * jnp.minimum(ratio * advantage, clipped * advantage))
    error = (seen.value - minibatch.target) ** 2
    if config.value_clip is not None:
        change = jnp.clip(seen.value - minibatch.value, -config.value_clip, config.value_clip)
        error = jnp.maximum(error, (minibatch.value + change - minibatch.target) ** 2)
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
