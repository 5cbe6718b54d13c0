"""Evaluation: one episode per environment, greedy or as the agent explores, on a PRNG key of its own.

One episode per environment, all of them counted: taking the first N episodes to end from a few environments would
favour short ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer import hosts
from podracer.envs.batch import Batch
from podracer.envs.host import is_host, on_host
from podracer.envs.with_state import for_evaluation
from podracer.errors import UserError, check_number
from podracer.types import Agent

DEFAULT_MAX_STEPS = 10_000
Measure = Callable[..., "Evaluation"]  # (params, seed) -> Evaluation


class Evaluation(NamedTuple):
    """E episodes; [M, E] where the params of many runs were measured at once."""

    returns: np.ndarray  # [E] float32, undiscounted
    lengths: np.ndarray  # [E] int32, steps
    finished: np.ndarray  # [E] bool, False: still running at the step cap; its return so far is counted

    def summary(self) -> dict[str, Any]:
        """Mean, spread and extremes over the last axis, as plain numbers (lists with many runs)."""

        def plain(values):
            return np.asarray(values, np.float64).round(6).tolist()

        return {
            "return_mean": plain(self.returns.mean(-1)),
            "return_std": plain(self.returns.std(-1)),
            "return_min": plain(self.returns.min(-1)),
            "return_max": plain(self.returns.max(-1)),
            "length_mean": plain(self.lengths.mean(-1)),
            "episodes": self.returns.shape[-1],
            "unfinished": (~self.finished).sum(-1).tolist(),
        }


class Evaluator:
    """A compiled evaluation, reusable for any params of the agent.

    Args:
      agent: whose `greedy_step` (or `actor_step`) acts.
      env: an environment or a `Batch` of one.
      episodes: E.
      max_steps: the cap per episode; None takes the environment's own limit, or 10,000.
      greedy: the best action instead of a sampled one.
      many: the params lead with an axis of runs [M].

    Raises:
      UserError: a greedy evaluation of an agent without `greedy_step`.
    """

    def __init__(
        self,
        agent: Agent,
        env: Any,
        episodes: int = 64,
        max_steps: int | None = None,
        greedy: bool = True,
        many: bool = False,
    ):
        _check(agent, episodes, max_steps, greedy)
        # Always fresh starts: cached ones would measure the states that training saw.
        self.batch = Batch(for_evaluation(env.env if isinstance(env, Batch) else env))
        self.agent, self.episodes, self.greedy = agent, episodes, greedy
        self.max_steps = max_steps or self.batch.spec.max_episode_steps or DEFAULT_MAX_STEPS
        self._run = jax.jit(jax.vmap(self._episodes, (0, None)) if many else self._episodes)

    def __call__(self, params: Any, seed: int = 0) -> Evaluation:
        """Measure `params`. The same seed gives the same start states and draws."""
        return Evaluation(*jax.tree.map(np.asarray, self._run(_on_one_core(params), jnp.uint32(seed))))

    def _episodes(self, params, seed):
        env_key, run_key = jax.random.split(jax.random.key(seed))
        env, timestep = self.batch.init(jax.random.split(env_key, self.episodes))
        actor = self.agent.initial_actor_state(self.episodes)
        act = self.agent.greedy_step if self.greedy else self.agent.actor_step
        assert act is not None  # checked when the evaluator was made

        # In next-step mode, one more step shows that an episode is over; it counts nothing.
        num_steps = self.max_steps + self.batch.next_step

        def running(carry):
            step, *_, live = carry
            return (step < num_steps) & jnp.any(live)

        def step(carry):
            step, actor, env, timestep, returns, lengths, live = carry
            act_key, env_key = jax.random.split(jax.random.fold_in(run_key, step))
            output, actor = act(params, actor, timestep, act_key)
            env, timestep = self.batch.step(env, output.action, jax.random.split(env_key, self.episodes))
            counts = live & timestep.valid & (step < self.max_steps)
            returns = returns + jnp.where(counts, timestep.reward, 0.0)
            return step + 1, actor, env, timestep, returns, lengths + counts, live & ~timestep.first

        zeros = jnp.zeros(self.episodes)
        start = (0, actor, env, timestep, zeros, zeros.astype(jnp.int32), jnp.ones(self.episodes, bool))
        *_, returns, lengths, live = jax.lax.while_loop(running, step, start)
        return returns, lengths, ~live


class HostEvaluator:
    """The evaluation of host environments: whole games, by their score, one per environment.

    Args:
      agent: whose `greedy_step` (or `actor_step`) acts.
      env: a host environment.
      episodes: E, the size of the batch that plays.
      max_steps: the cap per game; None takes the environment's own limit, or 10,000.
      greedy: the best action instead of a sampled one.
      between_steps: called at each step; what it raises ends the evaluation.

    Raises:
      UserError: a greedy evaluation of an agent without `greedy_step`.
    """

    def __init__(
        self,
        agent: Agent,
        env: Any,
        episodes: int = 10,
        max_steps: int | None = None,
        greedy: bool = True,
        between_steps: Callable[[], None] = lambda: None,
    ):
        _check(agent, episodes, max_steps, greedy)
        self.agent, self.episodes, self.greedy = agent, episodes, greedy
        self.env = on_host(for_evaluation(env), episodes)
        self.max_steps = max_steps or self.env.spec.max_episode_steps or DEFAULT_MAX_STEPS
        self._between_steps = between_steps
        act = agent.greedy_step if greedy else agent.actor_step
        assert act is not None

        def decide(params, actor, timestep, key, number):
            output, actor = act(params, actor, timestep, jax.random.fold_in(key, number))
            return output.action, actor

        self._decide = jax.jit(decide)

    def __call__(self, params: Any, seed: int = 0) -> Evaluation:
        """Measure `params`. The same seed gives the same start states and draws."""
        batch = self.env.start(evaluation_seeds(seed, self.episodes))
        try:
            return self._play(batch, _on_one_core(params), jax.random.key(seed))
        finally:
            batch.close()

    def _play(self, batch: Any, params: Any, key: jax.Array) -> Evaluation:
        actor = self.agent.initial_actor_state(self.episodes)
        step, live = batch.reset(), np.ones(self.episodes, bool)
        scores, lengths = np.zeros(self.episodes, np.float32), np.zeros(self.episodes, np.int32)
        number = 0
        # A lost life takes a step that counts nothing, so the cap is on counted ones.
        while np.any(live & (lengths < self.max_steps)):
            self._between_steps()
            action, actor = self._decide(params, actor, step.timestep, key, np.uint32(number))
            step, number = batch.step(jax.tree.map(np.asarray, action)), number + 1
            counts = live & step.timestep.valid & (lengths < self.max_steps)
            scores += np.where(counts, step.score, 0).astype(np.float32)
            lengths += counts
            live &= ~step.game_over
        return Evaluation(scores, lengths, ~live)


def evaluation_seeds(seed: int, count: int) -> list[int]:
    """Seeds of host environments [count], none of which training uses: those are below 2**30."""
    drawn = np.random.default_rng(np.random.SeedSequence((seed, count))).integers(2**30, 2**31, 2 * count + 100)
    return np.unique(drawn)[:count].tolist()


def evaluator(
    agent: Agent,
    env: Any,
    episodes: int,
    max_steps: int | None = None,
    greedy: bool = True,
    many: bool = False,
    between_steps: Callable[[], None] = lambda: None,
) -> Evaluator | HostEvaluator:
    """The evaluator for `env`, whichever side it runs on. `between_steps` is called where that is the host's."""
    if is_host(env):
        return HostEvaluator(agent, env, episodes, max_steps, greedy, between_steps)
    return Evaluator(agent, env, episodes, max_steps, greedy, many)


def shared(make: Callable[..., Any], agent: Agent, env: Any, episodes: int, *options: Any, **named: Any) -> Measure:
    """`make(agent, env, episodes, ...)`; of several hosts each measures its share, and all get what all have measured.

    All hosts must call what comes back, equally often; each draws start states of its own from the seed. `make` is
    `evaluator` or one of the classes it returns.
    """
    number = hosts.count()
    if number == 1:
        return make(agent, env, episodes, *options, **named)
    share = max(episodes // number + (hosts.index() < episodes % number), 1)
    measure, between = make(agent, env, share, *options, **named), named.get("between_steps", lambda: None)

    def together(params: Any, seed: int = 0) -> Evaluation:
        own = np.random.SeedSequence((seed, hosts.index())).generate_state(1)[0]
        parts = hosts.gather("evaluation", [leaf.tolist() for leaf in measure(params, int(own))], between)
        returns, lengths, finished = (np.concatenate(leaves, -1) for leaves in zip(*parts))
        return Evaluation(returns.astype(np.float32), lengths.astype(np.int32), finished.astype(bool))

    return together


def _check(agent: Agent, episodes: int, max_steps: int | None, greedy: bool) -> None:
    check_number("episodes", episodes, minimum=1)
    check_number("max_steps", max_steps, minimum=1)
    if greedy and agent.greedy_step is None:
        raise UserError(f"agent {agent.name} has no greedy_step; expected one. Evaluate it without --greedy.")


def _on_one_core(params: Any) -> Any:
    """Replicated params as this host's first copy of them; others as they are."""

    def leaf(value):
        replicated = isinstance(value, jax.Array) and value.sharding.is_fully_replicated
        return value.addressable_data(0) if replicated and len(value.sharding.device_set) > 1 else value

    return jax.tree.map(leaf, params)
