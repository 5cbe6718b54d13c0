"""Gradient steps on what the memory holds: sample, target, loss, priorities, target network."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from muzero import targets as targets_of
from muzero.config import SearchConfig
from muzero.loss import Costs, loss
from muzero.planning import Planner, Search, root_of
from muzero.replay import Memory, Replay, Sample, importance
from muzero.targets import Targets, Window, at
from podracer import learning
from podracer.agents.common import normalised
from podracer.specs import action_mask, features
from podracer.types import Array, Metrics


class Progress(NamedTuple):
    """What a gradient step changes."""

    learner: learning.Learner
    target: Any  # the target network's weights, or () where it is not used
    steps: Array  # [] int32, gradient steps so far
    memory: Memory  # its priorities


class Fixed(NamedTuple):
    """What stays as it is during all gradient steps of one learner step."""

    observation: Any  # Moments, or ()
    updates: Array  # [] int32, learner steps so far
    learning_rate: Array


@dataclasses.dataclass(frozen=True)
class GradientSteps:
    """How to make them."""

    config: SearchConfig
    planner: Planner
    search: Search
    replay: Replay
    rule: Any

    def run(
        self, progress: Progress, fixed: Fixed, number: Array, batch_size: int, key: Array, axis_name: str | None
    ) -> tuple[Progress, Metrics]:
        """`number` [] steps on `batch_size` starts of this core each, and the sums of their metrics."""

        def step(progress, key):
            return self.step(progress, fixed, batch_size, key, axis_name)

        def body(i, carry):
            progress, sums = carry
            progress, metrics = step(progress, jax.random.fold_in(key, i))
            return progress, jax.tree.map(jnp.add, sums, metrics)

        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(step, progress, key)[1])
        return jax.lax.fori_loop(0, number, body, (progress, zeros))

    def step(
        self, progress: Progress, fixed: Fixed, batch_size: int, key: Array, axis_name: str | None
    ) -> tuple[Progress, Metrics]:
        """One gradient step."""
        config = self.config
        sample_key, action_key, search_key = jax.random.split(key, 3)
        sample = self.replay.sample(progress.memory, sample_key, batch_size)
        window = self.window(progress, fixed, sample, search_key)
        targets = self.targets(window, action_key)
        weight = learning.mean_weights(targets.value_mask[0], axis_name)
        if self.replay.prioritised:
            weight = weight * importance(sample, config.importance_exponent, axis_name)
        observation, following, legal = self.unrolled(progress.memory, sample, fixed)
        consistency = config.consistency_cost if config.self_consistency else None
        costs = Costs(config.value_cost, config.reward_cost, consistency, config.entropy_cost)
        costs = costs._replace(outcome=config.outcome_cost, commitment=config.commitment_cost)

        def function(weights):
            return loss(self.planner, weights, observation, following, targets, weight, costs, legal)

        learner, metrics = learning.gradient_step(function, progress.learner, self.rule, fixed.learning_rate, axis_name)
        error = metrics.pop("start_value") - targets.value[0]
        memory = self.replay.reprioritise(progress.memory, sample, error, config.priority_exponent)
        steps = progress.steps + 1
        return Progress(learner, self.followed(progress.target, learner.weights, steps), steps, memory), metrics

    def observe(self, memory: Memory, row: Array, position: Array, fixed: Fixed) -> Any:
        """Observations [P, B, ...], normalised, at positions [P, B] of the sequences `row` [B]."""
        seen = self.replay.packing.unpack(memory.sequences.observation, row, position)
        return normalised(fixed.observation, seen)

    def unrolled(self, memory: Memory, sample: Sample, fixed: Fixed) -> tuple[Any, Any, Any]:
        """Features at the start [B, ...] and, where a loss asks for them, after each step [K, B, ...]; legal actions.

        The latter are [K + 1, B, A], or None where all are legal.
        """
        wanted = self.config.self_consistency or self.planner.outcomes > 0
        position = sample.start[None] + _steps(self.config.unroll_steps + 1)
        legal = action_mask(self.observe(memory, sample.row, position, fixed))
        seen = features(self.observe(memory, sample.row, position if wanted else position[:1], fixed))
        first, rest = (jax.tree.map(lambda leaf, part=part: leaf[part], seen) for part in (0, slice(1, None)))
        return first, rest if wanted else None, legal

    def window(self, progress: Progress, fixed: Fixed, sample: Sample, key: Array) -> Window:
        """All that the targets of `sample` depend on."""
        config, length = self.config, self.replay.length
        size = min(length, config.unroll_steps + 1 + config.td_steps)
        first = jnp.minimum(sample.start, length - size)
        rows = jax.tree.map(
            lambda leaf: jnp.moveaxis(leaf[sample.row], 0, 1), progress.memory.sequences._replace(observation=())
        )
        action, policy, value = at((rows.action, rows.policy, rows.value), first, size)
        window = Window(at(rows.timestep, first, size + 1), action, policy, value, sample.start - first)
        if config.value_target == "network":
            position = first[None] + _steps(size)
            seen = features(self.observe(progress.memory, sample.row, position, fixed))
            root = root_of(self.planner, progress.target, _flat(seen))
            window = window._replace(value=root.value.reshape(value.shape))
        return self.reanalysed(window, progress, fixed, sample, key)

    def reanalysed(self, window: Window, progress: Progress, fixed: Fixed, sample: Sample, key: Array) -> Window:
        """The first rows of the batch as the target network's search sees them now (Schrittwieser et al. 2021)."""
        root_values = self.config.value_target == "root"
        rows = self.config.reanalysed * sample.row.shape[0] // self.config.batch_size
        if not rows:
            return window
        start = jnp.zeros(rows, jnp.int32) if root_values else window.start[:rows]
        place = start[None] + _steps(window.value.shape[0] if root_values else self.config.unroll_steps + 1)
        position = place + (sample.start - window.start)[None, :rows]
        seen = self.observe(progress.memory, sample.row[:rows], position, fixed)
        seen, mask = _flat(features(seen)), _flat(action_mask(seen))
        plan = self.search(self.planner, progress.target, seen, mask, key, fixed.updates)
        column = jnp.broadcast_to(jnp.arange(rows)[None], place.shape)

        # The time step after the last decision has no place in the window; it is left out.
        def put(old, new):
            return old.at[place, column].set(new.reshape(*place.shape, *new.shape[1:]), mode="drop")

        window = window._replace(policy=jax.tree.map(put, window.policy, plan.policy))
        if root_values:
            window = window._replace(value=put(window.value, plan.value))
        return window

    def targets(self, window: Window, key: Array) -> Targets:
        """Targets of the unrolls of a window."""
        config, actions = self.config, self.planner.actions
        shape = (config.unroll_steps, window.start.shape[0])
        random_action = actions.sample(key, jnp.zeros((*shape, actions.num_numbers)))
        found = targets_of.targets(
            window, config.unroll_steps, self.planner.discount, config.td_steps, config.td_lambda, random_action
        )
        return jax.tree.map(jax.lax.stop_gradient, found)

    def followed(self, target: Any, weights: Any, steps: Array) -> Any:
        """The target network after a gradient step."""
        config = self.config
        if not config.has_target:
            return target
        if config.target_update == "ema":
            keep = config.target_decay
            return jax.tree.map(lambda old, new: keep * old + (1.0 - keep) * new, target, weights)
        copy = steps % config.target_period == 0
        return jax.tree.map(lambda old, new: jnp.where(copy, new, old), target, weights)


def _steps(count: int) -> Array:
    """[count, 1] int32: 0, 1, 2, ..."""
    return jnp.arange(count)[:, None]


def _flat(tree: Any) -> Any:
    """[P, B, ...] -> [P * B, ...]; None stays None."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), tree)
