"""An agent of your own: REINFORCE with a learned baseline (Williams 1992), as the four functions of the contract.

python examples/my_agent.py                                     train it on Catch from Python
podracer train anakin --env catch --agent examples/my_agent.py:make --agent.learning-rate 0.001
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from podracer import learning, networks, returns
from podracer.networks.functional import functional
from podracer.networks.heads import ActorCritic
from podracer.networks.policies import policy
from podracer.specs import Spec
from podracer.types import ActorOutput, Agent, LearnerState


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of REINFORCE. The text below each field is its help on the command line."""

    learning_rate: float = 3e-3
    """Step size of the optimizer."""
    discount: float = 0.99
    """Gamma: what a reward one step later is worth."""


def make(spec: Spec, config: Config = Config(), network: Callable = networks.mlp()) -> Agent:
    """The agent. `config` and `network` are optional: with them, the command line offers their settings as flags."""
    distribution = policy(spec.action)
    model = functional(lambda rngs: ActorCritic(spec, network, shared=False, rngs=rngs))
    rule = learning.optimizer("adam", max_grad_norm=0.5, epsilon=1e-5)

    def initial_learner_state(key):
        weights = model.init(key)
        return LearnerState(params=weights, opt_state=rule.init(weights))

    def initial_actor_state(batch_size):
        return model.module.initial_state(batch_size)  # () without a memory

    def decide(params, state, timestep):
        return model.apply(params, lambda net, *args: net.act(*args), timestep.observation, timestep.first, state)

    def actor_step(params, state, timestep, key):
        outputs, state = decide(params, state, timestep)
        return ActorOutput(distribution.sample(key, outputs.policy)), state

    def greedy_step(params, state, timestep, key):
        outputs, state = decide(params, state, timestep)
        return ActorOutput(distribution.mode(outputs.policy)), state

    def learner_step(learner, trajectory, key, axis_name):
        timestep, action = trajectory.timestep, trajectory.actor_output.action
        weight = learning.mean_weights(timestep.valid[1:], axis_name)  # resets between episodes do not count

        def loss(weights):
            inputs = (timestep.observation, timestep.first, trajectory.actor_state)
            seen = model.apply(weights, lambda net, *args: net.unroll(*args)[0], *inputs)
            baseline = jax.lax.stop_gradient(seen.value)
            target = returns.lambda_returns(returns.transitions(timestep, baseline, config.discount), 1.0)
            log_prob = distribution.log_prob(seen.policy[:-1], action)
            policy_loss = -jnp.sum(weight * (target - baseline[:-1]) * log_prob)
            value_loss = 0.5 * jnp.sum(weight * (target - seen.value[:-1]) ** 2)
            return policy_loss + value_loss, {"policy_loss": policy_loss, "value_loss": value_loss}

        before = learning.Learner(learner.params, learner.opt_state)
        after, metrics = learning.gradient_step(loss, before, rule, config.learning_rate, axis_name)
        return learner._replace(params=after.weights, opt_state=after.opt_state), metrics

    four = (initial_learner_state, initial_actor_state, actor_step, learner_step)
    rebuild = lambda config: make(spec, config, network)  # so that `sweep` can vary its floats
    return Agent(*four, greedy_step, name="reinforce", config=config, network=network, rebuild=rebuild)


if __name__ == "__main__":
    import sys

    import anakin
    from podracer import envs

    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 400_000
    env = envs.Catch()
    run = anakin.train(make(env.spec), env, total_steps=steps, batch_per_core=32, unroll_length=27)
    print(f"reinforce on catch after {run.steps:,} steps: mean return {run.evaluate().returns.mean():.2f} of 1")
