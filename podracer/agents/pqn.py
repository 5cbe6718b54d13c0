"""PQN: Q-learning on parallel environments, without replay or target network (Gallici et al. 2024)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from podracer import learning, returns
from podracer.agents import decisions
from podracer.agents.common import CommonConfig, assemble, make_optimizer
from podracer.errors import UserError, check_number
from podracer.networks import mlp
from podracer.networks.heads import QNetwork
from podracer.networks.policies import ILLEGAL
from podracer.specs import Discrete, Spec
from podracer.types import Agent


@dataclasses.dataclass(frozen=True)
class Config(CommonConfig):
    """Settings of PQN."""

    learning_rate: float = 5e-4
    """Step size of the optimizer."""
    max_grad_norm: float = 10.0
    """Gradients are scaled down to this global norm."""
    optimizer: learning.OptimizerName = "radam"
    """The optimizer."""
    epochs: int = 2
    """Passes over each trajectory."""
    minibatches: int = 8
    """Parts that each pass is split into, one gradient step each."""
    q_lambda: float = 0.65
    """Lambda of the Q(lambda) targets."""
    epsilon_start: float = 1.0
    """Share of random actions at first."""
    epsilon_end: float = 0.05
    """Share of random actions after `epsilon_updates`."""
    epsilon_updates: int = 200
    """Learner updates over which the share of random actions falls."""

    def __post_init__(self):
        super().__post_init__()
        check_number("epochs", self.epochs, minimum=1, whole=True)
        check_number("minibatches", self.minibatches, minimum=1, whole=True)
        check_number("q_lambda", self.q_lambda, minimum=0, maximum=1)
        check_number("epsilon_start", self.epsilon_start, minimum=0, maximum=1)
        check_number("epsilon_end", self.epsilon_end, minimum=0, maximum=1)
        check_number("epsilon_updates", self.epsilon_updates, minimum=1)


def pqn(
    spec: Spec,
    config: Config = Config(),
    network: Callable = mlp((128, 128), "relu", layer_norm=True),
) -> Agent:
    """The agent. Its network should have layer norms: they are what makes learning without a target network stable.

    Raises:
      UserError: the actions are not discrete.
    """
    if not isinstance(spec.action, Discrete):
        raise UserError(
            f"pqn cannot drive {spec.name}: its actions are {type(spec.action).__name__}; expected Discrete. "
            "Choose ppo, a2c or impala."
        )
    num_actions = spec.action.num_values
    rule = make_optimizer(config)

    def epsilon(updates):
        share = jnp.minimum(updates / config.epsilon_updates, 1.0)
        return config.epsilon_start + share * (config.epsilon_end - config.epsilon_start)

    def greedy(q_values):
        return jnp.argmax(q_values, -1).astype(jnp.int32)

    def act(q_values, updates, key):
        """Epsilon-greedy; random actions are drawn among the legal ones."""
        draw = jax.random.uniform(key, (2, *q_values.shape[:-1]))
        legal = q_values > ILLEGAL / 2
        rank = jnp.floor(draw[1] * jnp.sum(legal, -1)).astype(jnp.int32)
        chosen = legal & (jnp.cumsum(legal, -1) - 1 == rank[..., None])
        explore = draw[0] < epsilon(updates)
        return jnp.where(explore, jnp.argmax(chosen, -1), greedy(q_values)).astype(jnp.int32), jnp.max(q_values, -1)

    def unroll(network, weights, observation, first, state):
        return network.apply(weights, lambda module, *args: module.unroll(*args)[0], observation, first, state)

    def update(network, learner, experience, updates, learning_rate, key, axis_name):
        def best_values(*sequence):
            return jnp.max(unroll(network, learner.weights, *sequence), -1)

        best = decisions.values(experience, experience.extras, best_values)
        step = returns.transitions(experience.timestep, best, config.discount)
        targets = returns.lambda_returns(step, config.q_lambda)
        batch = decisions.decisions(experience, step.valid, targets, config.minibatches)

        def gradient_step(learner, minibatch: decisions.Decisions, scale):
            def loss(weights):
                weight = minibatch.valid * scale
                q_values = minibatch.unroll(lambda *sequence: unroll(network, weights, *sequence))
                chosen = jax.nn.one_hot(minibatch.action, num_actions, dtype=bool)
                q_value = jnp.sum(jnp.where(chosen, q_values, 0.0), -1)
                error = jnp.sum(weight * (q_value - minibatch.own) ** 2)
                return 0.5 * error, {"td_error": error, "q_value": jnp.sum(weight * q_value)}

            return learning.gradient_step(loss, learner, rule, learning_rate, axis_name)

        learner, metrics = learning.minibatch_epochs(
            gradient_step,
            learner,
            batch,
            lambda minibatch: learning.mean_scale(minibatch.valid, axis_name),
            key,
            config.epochs,
            config.minibatches,
        )
        return learner, {**metrics, "epsilon": epsilon(updates)}

    return assemble(
        "pqn",
        spec,
        config,
        recipe=network,
        build_network=lambda rngs: QNetwork(spec, network, rngs),
        act=act,
        greedy=greedy,
        update=update,
        rebuild=lambda config: pqn(spec, config, network),
    )
