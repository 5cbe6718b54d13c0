"""Evaluation: one episode per environment, greedy or as the agent explores, on a PRNG key of its own.

One episode per environment, all of them counted: taking the first N episodes to end from a few environments would
favour short ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer.envs.batch import Batch
from podracer.errors import UserError, check_number
from podracer.types import Agent

DEFAULT_MAX_STEPS = 10_000


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
        check_number("episodes", episodes, minimum=1)
        check_number("max_steps", max_steps, minimum=1)
        if greedy and agent.greedy_step is None:
            raise UserError(f"agent {agent.name} has no greedy_step; expected one. Evaluate it without --greedy.")
        # Always fresh starts: cached ones would measure the states that training saw.
        self.batch = Batch(env.env if isinstance(env, Batch) else env)
        self.agent, self.episodes, self.greedy = agent, episodes, greedy
        self.max_steps = max_steps or self.batch.spec.max_episode_steps or DEFAULT_MAX_STEPS
        self._run = jax.jit(jax.vmap(self._episodes, (0, None)) if many else self._episodes)

    def __call__(self, params: Any, seed: int = 0) -> Evaluation:
        """Measure `params`. The same seed gives the same start states and draws."""
        params = jax.tree.map(lambda leaf: leaf.addressable_data(0) if _is_replicated(leaf) else leaf, params)
        return Evaluation(*jax.tree.map(np.asarray, self._run(params, jnp.uint32(seed))))

    def _episodes(self, params, seed):
        env_key, run_key = jax.random.split(jax.random.key(seed))
        env, timestep = self.batch.init(jax.random.split(env_key, self.episodes))
        actor = self.agent.initial_actor_state(self.episodes)
        act = self.agent.greedy_step if self.greedy else self.agent.actor_step

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


def _is_replicated(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1 and leaf.sharding.is_fully_replicated
