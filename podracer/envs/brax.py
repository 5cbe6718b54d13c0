"""Rigid-body tasks of brax (ant, humanoid, ...): https://github.com/google/brax."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from podracer.envs import adapting, api
from podracer.envs.batch import TimeLimit
from podracer.errors import UserError, check_number, unknown

_LISTED = (
    "ant fast halfcheetah hopper humanoid humanoidstandup inverted_pendulum inverted_double_pendulum pusher reacher "
    "swimmer walker2d"
)
NAMES = tuple(_LISTED.split())


@dataclasses.dataclass(frozen=True)
class _Raw:
    """A brax environment without brax's wrappers: no time limit, no auto-reset, no info that outlives an episode."""

    owner: Brax

    @property
    def spec(self) -> api.Spec:
        env = self.owner.made
        state = jax.eval_shape(env.reset, jax.random.key(0))
        return api.Spec(
            name=f"brax/{self.owner.name}",
            observation=adapting.array_spec(jax.eval_shape(adapting.compact, state.obs)),
            action=adapting.continuous(-1.0, 1.0, (env.action_size,)),
        )

    def reset(self, key):
        state = self.owner.made.reset(key)
        return state, adapting.compact(state.obs)

    def step(self, state, action, key):
        state = self.owner.made.step(state, action)
        # Some tasks give Python numbers.
        terminated, reward = jnp.asarray(state.done).astype(bool), jnp.asarray(state.reward, jnp.float32)
        return state, api.Step(adapting.compact(state.obs), reward, terminated, jnp.zeros((), bool))


@dataclasses.dataclass(frozen=True, init=False)
class Brax:
    """A brax task, cut (not terminated) after `episode_length` steps. Actions are bounded by [-1, 1].

    A reset costs as much as many steps, because it initialises the physics, and in a big batch some episode ends in
    almost every step. `Batch(env, starts="cached")` draws start states from those of the first episodes instead:
    as many different ones as the batch is wide. The state is brax's own, `info` and `metrics` included, and a
    reset replaces all of it.

    There is no `render`: brax draws through MuJoCo, which needs an OpenGL context.

    Args:
      name: such as "ant".
      backend: "generalized", "spring", "positional" or "mjx"; None: the task's own choice.
      episode_length: the time limit in steps.
      options: arguments of the task's constructor.

    Raises:
      UserError: brax is not installed, or knows no such name or option.
    """

    name: str
    backend: str | None
    episode_length: int
    options: tuple[tuple[str, Any], ...]

    def __init__(self, name: str, backend: str | None = None, episode_length: int = 1000, **options: Any):
        check_number("episode_length", episode_length, minimum=1)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "backend", backend)
        object.__setattr__(self, "episode_length", episode_length)
        object.__setattr__(self, "options", adapting.freeze(options, f"brax/{name}"))
        _ = self.spec  # now: brax makes constants, which must not happen inside a traced function

    @functools.cached_property
    def made(self) -> Any:
        """brax's own environment."""
        try:
            # mujoco prints which of its optional engines are missing; the user asked for none of them.
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                from brax import envs
        except ImportError as error:
            raise adapting.missing("brax", error) from error
        # brax offers no public list of its registry.
        registered = getattr(envs, "_envs", dict.fromkeys(NAMES))
        if self.name not in registered:
            raise unknown("brax environment", self.name, registered, "See `podracer envs`.")
        options = dict(self.options) | ({} if self.backend is None else {"backend": self.backend})
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # brax on its own maintenance
                return envs.get_environment(self.name, **options)
        except (TypeError, ValueError) as error:
            raise adapting.bad_option(f"brax/{self.name}", error, options, ("backend",)) from error
        except NotImplementedError as error:
            raise UserError(f"brax/{self.name} does not run on backend '{self.backend}': {error}") from error

    @functools.cached_property
    def _limited(self) -> TimeLimit:
        return TimeLimit(_Raw(self), self.episode_length)

    @functools.cached_property
    def spec(self) -> api.Spec:
        return self._limited.spec

    def reset(self, key):
        return self._limited.reset(key)

    def step(self, state, action, key):
        return self._limited.step(state, action, key)
