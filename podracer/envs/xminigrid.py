"""XLand-MiniGrid and its MiniGrid tasks: https://github.com/corl-team/xland-minigrid."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.envs import adapting, api
from podracer.errors import UserError, check_number, unknown

_LISTED = (
    "MiniGrid-BlockedUnlockPickUp MiniGrid-DoorKey-5x5 MiniGrid-DoorKey-6x6 MiniGrid-DoorKey-8x8 "
    "MiniGrid-DoorKey-16x16 MiniGrid-Empty-5x5 MiniGrid-Empty-6x6 MiniGrid-Empty-8x8 MiniGrid-Empty-16x16 "
    "MiniGrid-EmptyRandom-5x5 MiniGrid-EmptyRandom-6x6 MiniGrid-EmptyRandom-8x8 MiniGrid-EmptyRandom-16x16 "
    "MiniGrid-FourRooms MiniGrid-LockedRoom MiniGrid-MemoryS8 MiniGrid-MemoryS16 MiniGrid-MemoryS32 "
    "MiniGrid-MemoryS64 MiniGrid-MemoryS128 MiniGrid-Playground MiniGrid-Unlock MiniGrid-UnlockPickUp "
    "XLand-MiniGrid-R1-9x9 XLand-MiniGrid-R1-11x11 XLand-MiniGrid-R1-13x13 XLand-MiniGrid-R1-15x15 "
    "XLand-MiniGrid-R1-17x17 XLand-MiniGrid-R2-9x9 XLand-MiniGrid-R2-11x11 XLand-MiniGrid-R2-13x13 "
    "XLand-MiniGrid-R2-15x15 XLand-MiniGrid-R2-17x17 XLand-MiniGrid-R4-9x9 XLand-MiniGrid-R4-11x11 "
    "XLand-MiniGrid-R4-13x13 XLand-MiniGrid-R4-15x15 XLand-MiniGrid-R4-17x17 XLand-MiniGrid-R6-13x13 "
    "XLand-MiniGrid-R6-17x17 XLand-MiniGrid-R6-19x19 XLand-MiniGrid-R9-16x16 XLand-MiniGrid-R9-19x19 "
    "XLand-MiniGrid-R9-25x25"
)
NAMES = dict.fromkeys(_LISTED.split(), "MiniGrid task of XLand-MiniGrid") | {
    name: "a world of rooms for the tasks of --env.benchmark NAME"
    for name in _LISTED.split()
    if name.startswith("XLand-")
}


@dataclasses.dataclass(frozen=True, init=False)
class XMiniGrid:
    """`xminigrid.make(id)`, cut (not terminated) after `max_steps` steps.

    Tiles and colours are numbers without an order, so each value becomes a plane: the agent's view as bool [view, view,
    13 tiles + 12 colours].

    An "XLand-*" world is empty until it has a task: a goal, rules and objects. `benchmark` is a collection of tasks;
    each episode draws one of them, or all have the task `ruleset`. Every core holds the whole collection.

    Args:
      id: such as "MiniGrid-DoorKey-5x5" or "XLand-MiniGrid-R4-13x13".
      benchmark: for "XLand-*": "trivial-21k", "small-1m" ... (xminigrid downloads them), or a file of that format.
      ruleset: the number of one task in it; None: all.
      options: fields of the environment's parameters (`max_steps=200`, `view_size=9`).

    Raises:
      UserError: xminigrid is not installed, knows no such id or option, or an "XLand-*" world lacks its tasks.
    """

    id: str
    benchmark: str | None
    ruleset: int | None
    options: tuple[tuple[str, Any], ...]

    def __init__(self, id: str, benchmark: str | None = None, ruleset: int | None = None, **options: Any):
        object.__setattr__(self, "id", id)
        object.__setattr__(self, "benchmark", benchmark)
        object.__setattr__(self, "ruleset", ruleset)
        object.__setattr__(self, "options", adapting.freeze(options, f"xminigrid/{id}"))
        _ = self.spec  # now: xminigrid makes constants, which must not happen inside a traced function

    @functools.cached_property
    def made(self) -> tuple[Any, Any]:
        """xminigrid's own (environment, parameters)."""
        try:
            from xminigrid import registration
        except ImportError as error:
            raise adapting.missing("xminigrid", error) from error
        registered = registration.registered_environments()
        if self.id not in registered:
            raise unknown("xminigrid environment", self.id, registered, "See `podracer envs`.")
        env, params = registration.make(self.id)
        known = {field.name for field in dataclasses.fields(params)} - {"render_mode", "grid_type", "ruleset"}
        if strange := [name for name in dict(self.options) if name not in known]:
            do = f"It has {', '.join(sorted(known))}."
            raise unknown(f"xminigrid/{self.id} option", strange[0], known, do)
        return env, params.replace(**dict(self.options))

    @functools.cached_property
    def tasks(self) -> Any | None:
        """xminigrid's own benchmark, or None for worlds that are a task themselves."""
        from xminigrid import benchmarks

        owner, known = f"xminigrid/{self.id}", benchmarks.registered_benchmarks()
        if self.benchmark is None:
            if not hasattr(self.made[1], "ruleset"):
                return None
            raise UserError(
                f"{owner} is a world without a task; expected benchmark = {', '.join(known)} or a file of that format."
            )
        if not hasattr(self.made[1], "ruleset"):
            raise UserError(f"{owner} is a task already and takes no benchmark; expected one for XLand-* worlds only.")
        try:
            load = benchmarks.load_benchmark if self.benchmark in known else benchmarks.load_benchmark_from_path
            tasks = load(self.benchmark)
        except Exception as error:
            raise UserError(
                f"{owner}: benchmark '{self.benchmark}' cannot be loaded ({type(error).__name__}: {error}). "
                f"Expected {', '.join(known)} or a file of that format."
            ) from error
        if self.ruleset is not None:
            check_number("ruleset", self.ruleset, minimum=0, maximum=tasks.num_rulesets() - 1, whole=True)
        return jax.tree.map(jnp.asarray, tasks)

    @functools.cached_property
    def spec(self) -> api.Spec:
        env, params = self.made
        _ = self.tasks
        _, observation = jax.eval_shape(self.reset, jax.random.key(0))
        return api.Spec(
            name=f"xminigrid/{self.id}",
            observation=adapting.array_spec(observation),
            action=api.Discrete(env.num_actions(params)),
            truncates=True,
            max_episode_steps=adapting.limit(f"xminigrid/{self.id}", "max_steps", params.max_steps),
        )

    def reset(self, key):
        env, params = self.made
        if self.tasks is not None:
            if self.ruleset is None:
                task = self.tasks.sample_ruleset(jax.random.fold_in(key, 1))
            else:
                task = self.tasks.get_ruleset(self.ruleset)
            params = params.replace(ruleset=task)
        timestep = env.reset(params, key)
        return timestep, self._observe(timestep)

    def step(self, state, action, key):
        env, params = self.made
        state = env.step(params, state, action)
        terminated = state.discount == 0
        reward = jnp.asarray(state.reward, jnp.float32)
        return state, api.Step(self._observe(state), reward, terminated, state.last() & ~terminated)

    def _observe(self, timestep):
        from xminigrid.core import constants

        tile, colour = (timestep.observation[..., layer] for layer in (0, 1))
        planes = (
            jax.nn.one_hot(tile, constants.NUM_TILES, dtype=bool),
            jax.nn.one_hot(colour, constants.NUM_COLORS, dtype=bool),
        )
        return jnp.concatenate(planes, -1)

    def render(self, state):
        """uint8 [height, width, 3]: the whole grid, the agent's view highlighted."""
        env, params = self.made
        return np.asarray(env.render(params.replace(render_mode="rgb_array"), state))
