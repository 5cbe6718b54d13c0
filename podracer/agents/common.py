"""What all agents share: their common settings, acting with a network, and the frame around an update.

An agent's own file says how it explores and how it learns (`act`, `update`); this one turns that into the four
functions of the contract, with observation and reward normalisation, annealing and masks done once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podracer import learning, mesh, normalise
from podracer.errors import check_number
from podracer.networks.functional import functional
from podracer.plugins import check_call
from podracer.specs import Spec, features
from podracer.types import ActorOutput, Agent, Array, LearnerState, TimeStep, Trajectory


@dataclasses.dataclass(frozen=True)
class LearningConfig:
    """Settings that every agent has. Floats can be swept over in one program."""

    learning_rate: float = 5e-4
    """Step size of the optimizer."""
    anneal_steps: int | None = None
    """Decisions over which the learning rate falls linearly to 0; None keeps it constant."""
    discount: float = 0.99
    """Gamma: what a reward one step later is worth."""
    max_grad_norm: float = 0.5
    """Gradients are scaled down to this global norm."""
    optimizer: learning.OptimizerName = "adam"
    """The optimizer."""
    optimizer_epsilon: float = 1e-5
    """Added to the denominator of the optimizer's step."""
    normalize_observations: bool = False
    """Subtract the running mean of observations and divide by their standard deviation."""

    def __post_init__(self):
        check_number("learning_rate", self.learning_rate, minimum=0)
        check_number("anneal_steps", self.anneal_steps, minimum=1, whole=True)
        check_number("discount", self.discount, minimum=0, maximum=1)
        check_number("max_grad_norm", self.max_grad_norm, minimum=0, exclusive=True)
        check_number("optimizer_epsilon", self.optimizer_epsilon, minimum=0)


@dataclasses.dataclass(frozen=True)
class CommonConfig(LearningConfig):
    """Settings of agents that learn from each trajectory once, so that rewards can be scaled as they come."""

    normalize_rewards: bool = False
    """Divide rewards by the running standard deviation of the discounted return, and clip them at +-10."""


class Params(NamedTuple):
    """What actors receive."""

    weights: Any
    observation: Any = ()  # Moments of the observation's features, with normalize_observations
    reward: Any = ()  # Moments of the discounted return [], with normalize_rewards
    updates: Any = ()  # [] int32, learner steps so far; exploration schedules read it


class ActorState(NamedTuple):
    """What an actor carries from step to step."""

    network: Any  # [B, ...] recurrent state
    discounted_return: Any = ()  # [B] with normalize_rewards


class Extras(NamedTuple):
    """What actors note beside the action."""

    agent: Any  # [B, ...] what the agent's `act` returned
    discounted_return: Any = ()  # [B] after the reward of this time step


class Experience(NamedTuple):
    """A trajectory as an agent's `update` sees it: observations and rewards normalised with the params' statistics."""

    observation: Any  # [T + 1, B, ...]
    timestep: TimeStep  # [T + 1, B, ...] its rewards are scaled; its observation is the raw one
    network_state: Any  # [B, ...] before the first decision
    action: Any  # [T, B, ...]
    extras: Any  # [T, B, ...] the agent's own


def assemble(
    name: str,
    spec: Spec,
    config: CommonConfig,
    recipe: Any,
    build_network: Callable,
    act: Callable[[Any, Array, Array], tuple[Any, Any]],
    greedy: Callable[[Any], Any],
    update: Callable,
    rebuild: Callable[[Any], Agent],
) -> Agent:
    """An `Agent` from its two own ideas.

    Args:
      name: what is printed.
      spec: the environment's.
      config: the agent's settings.
      recipe: the network's, kept in the agent for the record.
      build_network: `(rngs) -> module` with `initial_state`, `act` and `unroll` (see `networks/heads.py`).
      act: `(network outputs [B, ...], updates so far, key) -> (action, extras)`.
      greedy: `(network outputs [B, ...]) -> action`.
      update: `(network, learner, experience, updates, learning_rate, key, axis_name) -> (learner, metrics)`, where
        `network` is a `Functional` and `learner` holds weights and optimizer state.
      rebuild: `(config) -> Agent`.
    """
    check_network(name, recipe, "(observation_spec, rngs) -> module", None, None)
    network = functional(build_network)
    rule = make_optimizer(config)

    def initial_learner_state(key):
        weights = network.init(key)
        observation = normalise.initial(features(spec.observation)) if config.normalize_observations else ()
        reward = normalise.initial(jnp.zeros(())) if config.normalize_rewards else ()
        params = Params(weights, observation, reward, jnp.zeros((), jnp.int32))
        return LearnerState(params, rule.init(weights))

    def initial_actor_state(batch_size):
        discounted_return = jnp.zeros(batch_size) if config.normalize_rewards else ()
        return ActorState(network.module.initial_state(batch_size), discounted_return)

    def outputs(params, state, timestep):
        observation = normalised(params.observation, timestep.observation)
        seen, network_state = network.apply(
            params.weights, lambda module, *args: module.act(*args), observation, timestep.first, state.network
        )
        discounted_return = ()
        if config.normalize_rewards:
            carried = jnp.where(timestep.first & ~timestep.valid, 0.0, state.discounted_return)
            # In same-step mode the reward at `first` still belongs to the episode that ended.
            discounted_return = config.discount * carried + timestep.reward
        return seen, ActorState(network_state, discounted_return)

    def actor_step(params, state, timestep, key):
        seen, state = outputs(params, state, timestep)
        action, extras = act(seen, params.updates, key)
        output = ActorOutput(action, Extras(extras, state.discounted_return))
        return output, _forget_return(state, timestep)

    def greedy_step(params, state, timestep, key):
        seen, state = outputs(params, state, timestep)
        return ActorOutput(greedy(seen)), _forget_return(state, timestep)

    def learner_step(state: LearnerState, trajectory: Trajectory, key, axis_name):
        params: Params = state.params
        timestep = trajectory.timestep
        if config.normalize_rewards:
            # Clipped: where no return has differed from 0 yet, their deviation is no scale for the first reward.
            scaled = jnp.clip(timestep.reward * normalise.scale(params.reward), -normalise.CLIP, normalise.CLIP)
            timestep = timestep._replace(reward=scaled)
        experience = Experience(
            observation=normalised(params.observation, timestep.observation),
            timestep=timestep,
            network_state=trajectory.actor_state.network,
            action=trajectory.actor_output.action,
            extras=trajectory.actor_output.extras.agent,
        )
        steps = (timestep.reward.shape[0] - 1) * timestep.reward.shape[1] * mesh.num_cores(axis_name)
        rate = learning.anneal(config.learning_rate, params.updates, steps, config.anneal_steps)
        learner = learning.Learner(params.weights, state.opt_state)
        learner, metrics = update(network, learner, experience, params.updates, rate, key, axis_name)
        # Statistics change last: this whole update used the version that acted.
        observation, reward = params.observation, params.reward
        if config.normalize_observations:
            seen = jax.tree.map(lambda leaf: leaf[:-1], features(timestep.observation))
            mask = jnp.ones(timestep.first[:-1].shape, bool)
            observation = normalise.update(observation, seen, mask, axis_name)
        if config.normalize_rewards:
            values = trajectory.actor_output.extras.discounted_return
            reward = normalise.update(reward, values, timestep.valid[:-1], axis_name)
        params = Params(learner.weights, observation, reward, params.updates + 1)
        return state._replace(params=params, opt_state=learner.opt_state), {**metrics, "learning_rate": rate}

    return Agent(
        initial_learner_state,
        initial_actor_state,
        actor_step,
        learner_step,
        greedy_step,
        name=name,
        config=config,
        network=recipe,
        rebuild=rebuild,
    )


def check_network(name: str, recipe: Any, expected: str, *arguments: Any) -> None:
    """Refuse a recipe that cannot be called with `arguments`: it was written for other agents, or wrongly.

    Raises:
      UserError: the agent `name` expected something else.
    """
    label = getattr(recipe, "__name__", type(recipe).__name__)
    check_call(f"{name}'s network {label}", recipe, f"a function {expected}", *arguments)


def normalised(moments: Any, observation: Any) -> Any:
    """`observation` by the statistics of its features; as it is where they are (). A mask stays beside it."""
    if not isinstance(moments, normalise.Moments):
        return observation
    seen = normalise.normalise(moments, features(observation))
    if isinstance(observation, dict) and "action_mask" in observation:
        return {"observation": seen, "action_mask": observation["action_mask"]}
    return seen


def make_optimizer(config: LearningConfig):
    """The optimizer of a config, without its learning rate."""
    return learning.optimizer(config.optimizer, config.max_grad_norm, config.optimizer_epsilon)


def _forget_return(state: ActorState, timestep: TimeStep) -> ActorState:
    """After the last reward of an episode (`first` and `valid`: same-step mode) the next return starts at 0."""
    if isinstance(state.discounted_return, tuple):
        return state
    return state._replace(discounted_return=jnp.where(timestep.first, 0.0, state.discounted_return))
