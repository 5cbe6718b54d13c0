"""Craftax and Craftax-Classic (an open world after Crafter and NetHack): https://github.com/MichaelTMatthews/Craftax."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import io
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.envs import adapting, api
from podracer.errors import unknown

NAMES = ("Craftax-Symbolic-v1", "Craftax-Pixels-v1", "Craftax-Classic-Symbolic-v1", "Craftax-Classic-Pixels-v1")
NEVER = 2**30  # a time limit that no episode reaches
PIXELS = 16  # per cell of a drawing; craftax has textures for 10, 16 and 64


@dataclasses.dataclass(frozen=True, init=False)
class Craftax:
    """A craftax environment without its auto-reset, cut (not terminated) after `max_timesteps` steps.

    craftax has one `done` for death, victory and the time limit: it is asked again with a limit that is never reached.
    Symbolic observations are float32 [size], pixels uint8 [height, width, 3] (craftax: the same from 0 to 1).

    A new world costs as much as many steps, and in a big batch some episode ends in almost every step: take
    `Batch(env, starts="optimistic")`. Compiling takes a minute or more for Craftax, a quarter of it for Classic.
    craftax makes its textures when pixels are first asked for, which takes minutes, and keeps them beside its code.

    Args:
      name: such as "Craftax-Symbolic-v1".
      options: fields of the environment's parameters (`max_timesteps=1000`, `god_mode=True`).

    Raises:
      UserError: craftax is not installed, or knows no such name or option.
    """

    name: str
    options: tuple[tuple[str, Any], ...]

    def __init__(self, name: str, **options: Any):
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "options", adapting.freeze(options, f"craftax/{name}"))
        _ = self.spec  # now: craftax makes constants, which must not happen inside a traced function

    @functools.cached_property
    def made(self) -> tuple[Any, Any]:
        """craftax's own (environment, parameters)."""
        try:
            from craftax import craftax_env
        except ImportError as error:
            raise adapting.missing("craftax", error) from error
        if self.name not in NAMES:
            raise unknown("craftax environment", self.name, NAMES, "See `podracer envs`.")
        with contextlib.redirect_stdout(io.StringIO()):  # about its textures
            env = craftax_env.make_craftax_env_from_name(self.name, auto_reset=False)
        params: Any = env.default_params  # of flax, with a `replace` that type checkers do not see
        known = [field.name for field in dataclasses.fields(params)]
        if strange := [name for name in dict(self.options) if name not in known]:
            do = f"It has {', '.join(sorted(known))}."
            raise unknown(f"craftax/{self.name} option", strange[0], known, do)
        return env, params.replace(**dict(self.options))

    @functools.cached_property
    def spec(self) -> api.Spec:
        env, params = self.made
        _, observation = jax.eval_shape(self.reset, jax.random.key(0))
        return api.Spec(
            name=f"craftax/{self.name}",
            observation=adapting.array_spec(observation),
            action=api.Discrete(int(env.action_space(params).n)),
            truncates=True,
            max_episode_steps=adapting.limit(f"craftax/{self.name}", "max_timesteps", params.max_timesteps),
        )

    def reset(self, key):
        env, params = self.made
        observation, state = env.reset_env(key, params)
        return state, self._observe(observation)

    def step(self, state, action, key):
        env, params = self.made
        observation, state, reward, _, _ = env.step_env(key, state, action, params)
        terminated, truncated = self._ends(state)
        return state, api.Step(self._observe(observation), jnp.asarray(reward, jnp.float32), terminated, truncated)

    def _ends(self, state):
        env, params = self.made
        terminated = env.is_terminal(state, params.replace(max_timesteps=NEVER))
        return terminated, env.is_terminal(state, params) & ~terminated

    def _observe(self, observation):
        if "Pixels" in self.name:
            return jnp.round(observation * 255).astype(jnp.uint8)
        return adapting.compact(observation)

    @functools.cached_property
    def _renderer(self) -> Any:
        game = "craftax_classic" if "Classic" in self.name else "craftax"
        module = importlib.import_module(f"craftax.{game}.renderer")
        with contextlib.redirect_stdout(io.StringIO()):
            return jax.jit(module.make_craftax_pixel_renderer(PIXELS))

    def render(self, state):
        """uint8 [height, width, 3]: what the player sees, inventory included."""
        return np.asarray(self._renderer(state)).clip(0, 255).astype(np.uint8)
