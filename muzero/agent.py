"""MuZero: plans with a model that it learns (Schrittwieser et al. 2020), with PUCT or Gumbel's search (Danihelka 2022),
over all actions or over a sample of them (Hubert et al. 2021), with chance in the model (Antonoglou et al. 2022).

Acting searches from each observation and notes what the search found. Learning stores the trajectory, and then takes as
many gradient steps on what the memory holds as the replay ratio allows: how much is acted at a time and how much is
learnt from at a time are two things.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from muzero import limiter, planning, sequences
from muzero.checks import check_actions, check_model
from muzero.config import Config, GumbelConfig, SampledConfig, SearchConfig, StochasticConfig
from muzero.learner import Fixed, GradientSteps, Progress
from muzero.model import Heads
from muzero.model import network as default_network
from muzero.planning import Plan, Planner, Search
from muzero.replay import Memory, Replay
from muzero.sampling import Sampler
from muzero.support import Support
from podracer import learning, mesh, normalise
from podracer.agents.common import check_network, make_optimizer, normalised
from podracer.errors import UserError, check_divides
from podracer.networks.functional import functional
from podracer.networks.policies import policy
from podracer.specs import Spec, action_mask, features, without_state
from podracer.types import ActorOutput, Agent, Array, LearnerState, ReplaySize, TimeStep, Trajectory

# Metric -> the greatest good value, and what is said where it is passed.
ALARMS = {
    "value_clipped": (
        0.05,
        "more than 5 % of the targets of values lie beyond value_limit and are clipped. Raise --agent.value-limit.",
    ),
    "reward_clipped": (
        0.05,
        "more than 5 % of the rewards lie beyond reward_limit and are clipped. Raise --agent.reward-limit.",
    ),
    "nonfinite_searches": (
        0.0,
        "the model says something in a search that is no number (NaN or infinite); it counts as 0, and the metric "
        "nonfinite_searches has the share. Lower --agent.learning-rate or --agent.max-grad-norm.",
    ),
}


class Params(NamedTuple):
    """What actors receive."""

    weights: Any
    observation: Any  # Moments of the observation's features, with normalize_observations; else ()
    updates: Array  # [] int32, learner steps so far; the temperature reads it


class Slow(NamedTuple):
    """What every core has alike beside the weights."""

    target: Any  # the target network's weights; () where it is not used
    limiter: limiter.Limiter
    gradient_steps: Array  # [] int32
    metrics: dict[str, Array]  # of the last learner step that took gradient steps


class Notes(NamedTuple):
    """What an actor notes of each decision."""

    policy: Any  # what the search wants: [B, A], or sampling.Sampled [B, ...]
    value: Array  # [B] of the root
    visit_entropy: Array  # [B] nats
    nonfinite: Array  # [B] bool: the model said something that was no number, which counted as 0


def muzero(spec: Spec, config: Config = Config(), network: Callable = default_network()) -> Agent:
    """MuZero. `network`: see `muzero.network`, or a function (spec, heads, rngs) -> module with the same methods.

    Raises:
      UserError: the actions are not discrete, or the network does not fit.
    """
    search = planning.muzero_search(config)
    rebuild = lambda config: muzero(spec, config, network)
    return assemble("muzero", spec, config, network, search, learnt_plan(search), rebuild)


def gumbel_muzero(spec: Spec, config: GumbelConfig = GumbelConfig(), network: Callable = default_network()) -> Agent:
    """Gumbel MuZero: improves its policy with any number of simulations. Arguments as for `muzero`.

    Raises:
      UserError: the actions are not discrete, or the network does not fit.
    """
    search = planning.gumbel_search(config)
    rebuild = lambda config: gumbel_muzero(spec, config, network)
    return assemble("gumbel-muzero", spec, config, network, search, learnt_plan(search), rebuild)


def sampled_muzero(spec: Spec, config: SampledConfig = SampledConfig(), network: Callable = default_network()) -> Agent:
    """Sampled MuZero, for actions of any kind: searches over a sample of them. Arguments as for `muzero`.

    Raises:
      UserError: the network does not fit.
    """
    sampler = Sampler(spec.action, config.num_samples)
    search = planning.sampled_search(config, sampler)
    rebuild = lambda config: sampled_muzero(spec, config, network)
    return assemble("sampled-muzero", spec, config, network, search, learnt_plan(search), rebuild, sampler.edges)


def stochastic_muzero(
    spec: Spec, config: StochasticConfig = StochasticConfig(), network: Callable = default_network()
) -> Agent:
    """Stochastic MuZero: its model says what chance may do after an action. Arguments as for `muzero`.

    Raises:
      UserError: the actions are not discrete, or the network does not fit.
    """
    search = planning.stochastic_search(config)
    rebuild = lambda config: stochastic_muzero(spec, config, network)
    return assemble("stochastic-muzero", spec, config, network, search, learnt_plan(search), rebuild)


# `(planner, params, observation [B], key, acting) -> Plan`; `acting` as in `planning.Search`.
Think = Callable[[Planner, Params, Any, Array, Any], Plan]


def learnt_plan(search: Search) -> Think:
    """How agents with a learnt model plan: they see the features, normalised, and the mask."""

    def think(planner, params, observation, key, acting):
        seen = normalised(params.observation, observation)
        return search(planner, params.weights, features(seen), action_mask(seen), key, acting)

    return think


def assemble(
    name: str,
    spec: Spec,
    config: SearchConfig,
    recipe: Callable,
    search: Search,
    think: Think,
    rebuild: Callable[[Any], Agent],
    samples: int | None = None,
) -> Agent:
    """An `Agent` that searches, notes what it found, and learns from replay.

    Args:
      name: what is printed.
      spec: the environment's.
      config: the agent's settings.
      recipe: the network's, `(spec, heads, rngs) -> module`.
      search: plans again for what the memory holds (`reanalysed`).
      think: plans while acting.
      rebuild: `(config) -> Agent`.
      samples: how many actions nodes sample; None: they have all of them, which must be discrete.

    Raises:
      UserError: the actions are not discrete, or the network does not fit.
    """
    num_actions = check_actions(name, spec) if samples is None else samples
    expected = "(spec, heads, rngs) -> module with represent, step, predict and project, as --network muzero"
    check_network(name, recipe, expected, None, None, None)
    heads = Heads(config.value_bins, config.reward_bins, config.self_consistency, config.num_outcomes)
    network = functional(lambda rngs: recipe(spec, heads, rngs))
    check_model(name, spec, heads, network)
    discount = -config.discount if spec.alternating else config.discount
    value, reward = Support(config.value_limit, heads.value_bins), Support(config.reward_limit, heads.reward_bins)
    planner = Planner(network, value, reward, discount, policy(spec.action), config.num_outcomes)
    capacity = config.replay_steps // config.sequence_length
    replay = Replay(
        dataclasses.replace(spec, observation=without_state(spec.observation)),
        num_actions,
        capacity,
        config.sequence_length,
        config.unroll_steps,
        config.frame_stack,
        config.sampling == "prioritised",
        samples is not None,
    )
    rule = make_optimizer(config)
    steps = GradientSteps(config, planner, search, replay, rule)

    def initial_learner_state(key):
        weights = network.init(key)
        observation = normalise.initial(features(spec.observation)) if config.normalize_observations else ()
        params = Params(weights, observation, jnp.zeros((), jnp.int32))
        # A buffer of its own: weights and target are donated to the same program.
        target = jax.tree.map(jnp.copy, weights) if config.has_target else ()
        opt_state, zero = rule.init(weights), jnp.zeros((), jnp.int32)
        progress = Progress(learning.Learner(weights, opt_state), target, zero, replay.initial())
        fixed = Fixed(observation, zero, jnp.zeros(()))
        shapes = jax.eval_shape(lambda one, other: steps.step(one, other, 1, key, None)[1], progress, fixed)
        metrics = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return LearnerState(params, opt_state, Slow(target, limiter.initial(), zero, metrics), progress.memory)

    def actor_step(params: Params, state, timestep: TimeStep, key):
        found = think(planner, params, timestep.observation, key, params.updates)
        notes = Notes(found.policy, found.value, found.visit_entropy, found.nonfinite_at >= 0)
        return ActorOutput(found.action, notes), state

    def greedy_step(params: Params, state, timestep: TimeStep, key):
        return ActorOutput(think(planner, params, timestep.observation, key, None).action), state

    def shown_step(params: Params, state, timestep: TimeStep, key):
        found = think(planner, params, timestep.observation, key, None)
        return ActorOutput(found.action), found.tree

    return Agent(
        initial_learner_state,
        lambda batch_size: (),
        actor_step,
        lambda *args: _learner_step(config, steps, *args),
        greedy_step,
        name=name,
        config=config,
        network=recipe,
        rebuild=rebuild,
        replay=ReplaySize(capacity * config.sequence_length, replay.num_bytes()),
        search=shown_step,
        alarms=ALARMS,
    )


def _learner_step(
    config: SearchConfig,
    steps: GradientSteps,
    state: LearnerState,
    trajectory: Trajectory,
    key: Array,
    axis_name: str | None,
) -> tuple[LearnerState, dict[str, Array]]:
    """Store the trajectory, then take the gradient steps that it has earned."""
    params, slow, cores = state.params, state.slow, mesh.num_cores(axis_name)
    check_divides("batch_size", config.batch_size, "learner cores", cores)
    check_divides("reanalysed", config.reanalysed, "learner cores", cores)
    memory, broken, metrics = _store(steps.replay, state.memory, trajectory, axis_name)
    notes: Notes = trajectory.actor_output.extras
    decisions = notes.value.shape[0] * notes.value.shape[1] * cores
    ready = memory.count * (config.sequence_length * cores) >= _min_replay(config, steps.replay, cores)
    earned = jnp.where(ready, config.replay_ratio * (decisions / config.batch_size), 0.0)
    credit, number = limiter.earn(slow.limiter, earned)
    number = jnp.where(broken, 0, number)
    rate = learning.anneal(config.learning_rate, params.updates, decisions, config.anneal_steps)
    progress = Progress(learning.Learner(params.weights, state.opt_state), slow.target, slow.gradient_steps, memory)
    fixed = Fixed(params.observation, params.updates, rate)
    progress, sums = steps.run(progress, fixed, number, config.batch_size // cores, key, axis_name)
    skipped = sums["nonfinite_updates"] + broken
    means = jax.tree.map(lambda total: total / jnp.maximum(number, 1), mesh.mean(sums, axis_name))
    # Where no step was taken the numbers of the last one stay: zeros would falsify every average.
    means = jax.tree.map(lambda new, old: jnp.where(number > 0, new, old), means, slow.metrics)
    metrics |= means | {
        "nonfinite_updates": skipped,
        "learning_rate": rate,
        "gradient_steps": number.astype(jnp.float32),
        "replay_ratio": number * (config.batch_size / decisions),
        "replay_fill": progress.memory.count / steps.replay.capacity,
    }
    if steps.replay.prioritised:
        filled = jnp.maximum(progress.memory.count * steps.replay.num_starts, 1)
        metrics["priority"] = jnp.sum(progress.memory.priority) / filled
    observation = params.observation
    if config.normalize_observations:
        seen = jax.tree.map(lambda leaf: leaf[:-1], features(trajectory.timestep.observation))
        observation = normalise.update(observation, seen, jnp.ones(notes.value.shape, bool), axis_name)
    slow = Slow(progress.target, credit, progress.steps, means)
    params = Params(progress.learner.weights, observation, params.updates + 1)
    return LearnerState(params, progress.learner.opt_state, slow, progress.memory), metrics


def _store(replay: Replay, memory: Memory, trajectory: Trajectory, axis_name: str | None) -> tuple[Memory, Any, Any]:
    """The memory with a trajectory in it, whether any of its numbers was none, and metrics of acting."""
    notes: Notes = trajectory.actor_output.extras
    seen = without_state(trajectory.timestep.observation)
    trajectory = trajectory._replace(timestep=trajectory.timestep._replace(observation=seen))
    pieces = sequences.cut(trajectory, notes.policy, notes.value, replay.length)
    pieces, whole = sequences.harmless(pieces)
    pieces = pieces._replace(observation=jax.vmap(replay.packing.pack)(pieces.observation))
    broken = mesh.largest(jnp.any(~whole).astype(jnp.float32), axis_name)
    acted = trajectory.timestep.valid[1:]
    metrics = {
        "visit_entropy": mesh.masked_mean(notes.visit_entropy, acted, axis_name),
        "nonfinite_searches": mesh.masked_mean(notes.nonfinite.astype(jnp.float32), acted, axis_name),
    }
    if replay.frame_stack > 1:
        metrics["frames_lost"] = replay.packing.lost(pieces.observation)
    return replay.insert(memory, pieces), broken, metrics


def _min_replay(config: SearchConfig, replay: Replay, cores: int) -> int:
    """Decisions before the first gradient step.

    Raises:
      UserError: so many never fit.
    """
    room = replay.capacity * replay.length * cores
    if config.min_replay > room:
        raise UserError(
            f"min_replay is {config.min_replay:,}, but the memories of {cores} learner core{'s' if cores > 1 else ''} "
            f"hold {room:,} decisions; expected at most that. Lower min_replay or raise replay_steps."
        )
    return config.min_replay
