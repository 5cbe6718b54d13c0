"""One environment becomes a batch that resets itself: vmap, auto-reset and time steps, written once.

Two reset modes (see `podracer/types.py` for the flags):

    next-step   observation  o0 o1 o2(final) | o0' o1'       the step after an end is a reset: its action is ignored,
                first         1  0  0        |  1   0         its reward is 0 and `valid` is False
                valid         -  1  1        |  0   1

    same-step   observation  o0 o1 | o0' o1'                  the first observation of the next episode replaces the
                first         1  0 |  1   0                   final one; only for environments that never truncate,
                valid         -  1 |  1   1                   because the final observation is lost

Start states are fresh by default. Where a reset is expensive, "cached" draws from the start states of the batch's
first episodes, and "optimistic" computes only B / `optimistic_ratio` fresh ones per step (environments that end in
the same step may then share a start state).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from podracer.envs import api
from podracer.errors import UserError, check_divides, check_number, unknown
from podracer.types import Array, TimeStep

Mode = Literal["auto", "next-step", "same-step"]
Starts = Literal["fresh", "cached", "optimistic"]


class BatchState(NamedTuple):
    """State of B environments."""

    env: Any  # [B, ...] the environments' own states
    over: Array  # [B] bool, next-step mode: the last step ended the episode, the next one resets
    starts: Any = ()  # [B, ...] (state, observation) of the first episodes, with cached resets


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch of one environment. B is the number of keys that `init` and `step` are given."""

    env: Any
    mode: Mode = "auto"
    starts: Starts = "fresh"
    optimistic_ratio: int = 16

    def __post_init__(self):
        for what, value, options in (("mode", self.mode, get_args(Mode)), ("starts", self.starts, get_args(Starts))):
            if value not in options:
                raise unknown(what, str(value), options, f"Expected one of {', '.join(options)}.")
        if self.mode == "same-step" and self.env.spec.truncates:
            raise UserError(
                f"same-step resets lose the final observation, but {self.env.spec.name} truncates episodes; "
                "expected mode 'next-step' or 'auto'."
            )

    @property
    def spec(self) -> api.Spec:
        return self.env.spec

    @property
    def next_step(self) -> bool:
        return self.mode == "next-step" or (self.mode == "auto" and self.spec.truncates)

    def init(self, keys: Array) -> tuple[BatchState, TimeStep]:
        """Start B episodes. `keys` [B]: one PRNG key per environment."""
        batch_size = keys.shape[0]
        if self.starts == "optimistic":
            check_divides("batch size", batch_size, "optimistic_ratio", self.optimistic_ratio)
        env_state, observation = _strong(jax.vmap(self.env.reset)(keys))
        _check_observation(self.spec, observation)
        true, false = jnp.ones(batch_size, bool), jnp.zeros(batch_size, bool)
        timestep = TimeStep(
            observation=observation,
            reward=jnp.zeros(batch_size, jnp.float32),
            discount=jnp.ones(batch_size, jnp.float32),
            first=true,
            valid=false,
        )
        cached = (env_state, observation) if self.starts == "cached" else ()
        return BatchState(env_state, false, cached), timestep

    def step(self, state: BatchState, action: Any, keys: Array) -> tuple[BatchState, TimeStep]:
        """Act once in each environment. `action` [B, ...] in the agent's units, `keys` [B]."""
        env_state, out = jax.vmap(self.env.step)(state.env, to_environment(self.spec.action, action), keys)
        out = api.Step(*out)
        env_state, observation = _strong((env_state, out.observation))
        reward = out.reward.astype(jnp.float32)
        discount = 1.0 - out.terminated.astype(jnp.float32)
        done = jnp.logical_or(out.terminated, out.truncated)
        restart = state.over if self.next_step else done
        env_state, observation = self._restart(restart, (env_state, observation), state.starts, keys)
        if self.next_step:
            reward = jnp.where(restart, 0.0, reward)
            discount = jnp.where(restart, 1.0, discount)
            over, valid = done & ~restart, ~restart
        else:
            over, valid = jnp.zeros_like(done), jnp.ones_like(done)
        timestep = TimeStep(observation, reward, discount, first=restart, valid=valid)
        return BatchState(env_state, over, state.starts), timestep

    def _restart(self, restart: Array, current: Any, cached: Any, keys: Array) -> Any:
        """`current` (state, observation) [B, ...], with a new episode where `restart` [B]."""
        batch_size = restart.shape[0]

        def with_starts(current):
            # A stream of its own: the step above has consumed the keys themselves.
            reset_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, 1)
            if self.starts == "fresh":
                starts = _strong(jax.vmap(self.env.reset)(reset_keys))
            elif self.starts == "cached":
                which = jax.vmap(lambda key: jax.random.randint(key, (), 0, batch_size))(reset_keys)
                starts = jax.tree.map(lambda leaf: leaf[which], cached)
            else:
                num_starts = batch_size // self.optimistic_ratio
                fresh = _strong(jax.vmap(self.env.reset)(reset_keys[:num_starts]))
                # The i-th environment that restarts takes the i-th fresh state.
                which = jnp.maximum(jnp.cumsum(restart) - 1, 0) % num_starts
                starts = jax.tree.map(lambda leaf: leaf[which], fresh)
            _check_same(self.spec.name, starts, current)
            return jax.tree.map(lambda new, old: _where(restart, new, old), starts, current)

        # Most steps of a small batch end no episode at all, and then no reset is computed.
        return jax.lax.cond(jnp.any(restart), with_starts, lambda current: current, current)


def _strong(tree: Any) -> Any:
    """Without weak types (`time=0` in a state): they would make the second call of a compiled step compile again."""

    def leaf(value):
        return jax.lax.convert_element_type(value, value.dtype) if getattr(value, "weak_type", False) else value

    return jax.tree.map(leaf, tree)


def _check_same(name: str, starts: Any, current: Any) -> None:
    """Refuse environments whose `reset` and `step` disagree about structure, shapes or dtypes, naming the leaf."""
    starts, current = ({"state": state, "observation": seen} for state, seen in (starts, current))
    new, new_structure = jax.tree.flatten_with_path(starts)
    old, old_structure = jax.tree.flatten_with_path(current)
    if new_structure != old_structure:
        raise UserError(
            f"{name}: reset gives {new_structure}, step gives {old_structure}; expected the same structure of "
            "state and observation from both."
        )
    for (path, reset), (_, step) in zip(new, old, strict=True):
        if (reset.dtype, reset.shape) != (step.dtype, step.shape):
            raise UserError(
                f"{name}: {jax.tree_util.keystr(path, simple=True, separator='.')} is "
                f"{reset.dtype}{list(reset.shape[1:])} after reset and {step.dtype}{list(step.shape[1:])} after step; "
                "expected the same. Cast one of them."
            )


def _where(condition: Array, new: Array, old: Array) -> Array:
    """Select per environment; typed PRNG keys inside environment states are selected too."""
    if jnp.issubdtype(old.dtype, jax.dtypes.prng_key):
        data = _where(condition, jax.random.key_data(new), jax.random.key_data(old))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(old))
    return jnp.where(condition.reshape(condition.shape + (1,) * (old.ndim - 1)), new, old)


def _check_observation(spec: api.Spec, observation: Any) -> None:
    """Refuse observations [B, ...] that are not what the spec says."""

    def described(tree, skip):
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {jax.tree_util.keystr(path): (tuple(x.shape[skip:]), np.dtype(x.dtype).name) for path, x in leaves}

    found, wanted = described(observation, 1), described(spec.observation, 0)
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            got, said = (" ".join(map(str, x[name])) if name in x else "nothing" for x in (found, wanted))
            raise UserError(
                f"{spec.name}: reset gives observation{name} {got}; its spec says {said}. Change one of them."
            )


def to_environment(spec: api.Action, action: Any, xp: Any = jnp) -> Any:
    """From the agent's units to the environment's: bounded continuous actions go from [-1, 1] to [low, high].

    `xp` is `numpy` for environments on the host.
    """
    if not isinstance(spec, api.Continuous):
        return action
    low, high = np.asarray(spec.low, np.float32), np.asarray(spec.high, np.float32)
    bounded = np.isfinite(low) & np.isfinite(high)
    middle = np.where(bounded, (np.where(bounded, low, 0) + np.where(bounded, high, 0)) / 2, 0)
    scale = np.where(bounded, (np.where(bounded, high, 0) - np.where(bounded, low, 0)) / 2, 1)
    middle, scale, low, high = (xp.broadcast_to(each, action.shape) for each in (middle, scale, low, high))
    return xp.clip(middle + scale * action, low, high).astype(np.float32)


class TimeLimitState(NamedTuple):
    env: Any
    steps: Array  # [] int32, steps of this episode


@dataclasses.dataclass(frozen=True)
class TimeLimit:
    """`env`, cut (truncated, not terminated) after `max_steps` steps."""

    env: Any
    max_steps: int

    def __post_init__(self):
        check_number("max_steps", self.max_steps, minimum=1)

    @property
    def spec(self) -> api.Spec:
        inner = self.env.spec
        limit = min(self.max_steps, inner.max_episode_steps or self.max_steps)
        return dataclasses.replace(inner, truncates=True, max_episode_steps=limit)

    def reset(self, key):
        state, observation = self.env.reset(key)
        return TimeLimitState(state, jnp.zeros((), jnp.int32)), observation

    def step(self, state, action, key):
        env_state, out = self.env.step(state.env, action, key)
        out = api.Step(*out)
        steps = state.steps + 1
        # `~` would be wrong for environments that give Python bools.
        truncated = jnp.logical_or(out.truncated, steps >= self.max_steps) & jnp.logical_not(out.terminated)
        return TimeLimitState(env_state, steps), out._replace(truncated=truncated)

    def render(self, state):
        return self.env.render(state.env)
