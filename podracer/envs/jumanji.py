"""Combinatorial tasks of jumanji (packing, routing, puzzles): https://github.com/instadeepai/jumanji."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.envs import adapting, api
from podracer.errors import UserError, unknown

# What `names()` lists without importing jumanji; other names that the installed jumanji knows work as well.
NAMES = {
    "BinPack-v2": "pack boxes into a container",
    "CVRP-v1": "serve all customers with one vehicle of limited load, on the shortest way",
    "Cleaner-v0": "several cleaners sweep every tile of a maze",
    "FlatPack-v0": "lay rotated blocks so that they cover a grid",
    "Game2048-v1": "slide and merge tiles to 2048",
    "GraphColoring-v1": "colour a graph with few colours, neighbours in different ones",
    "JobShop-v0": "schedule jobs on machines, in the shortest time",
    "Knapsack-v1": "choose items of the greatest value that fit the budget",
    "MMST-v0": "connect several sets of nodes of one graph by trees that share no node",
    "Maze-v0": "find the way to a target in a random maze",
    "Minesweeper-v0": "open all cells without a mine",
    "PacMan-v1": "eat all pellets, flee the ghosts",
    "RobotWarehouse-v0": "several robots bring requested shelves to the goals",
    "RubiksCube-v0": "solve a cube after 100 random turns",
    "RubiksCube-partly-scrambled-v0": "solve a cube after 7 random turns",
    "SlidingTilePuzzle-v0": "order the tiles of a 5 x 5 puzzle",
    "Snake-v1": "eat fruit and grow, without biting yourself",
    "Sokoban-v0": "push four boxes onto their targets",
    "Sudoku-v0": "fill in a Sudoku, any of 10,000",
    "Sudoku-very-easy-v0": "fill in a Sudoku with few empty cells",
    "TSP-v1": "visit 20 cities on the shortest tour",
    "Tetris-v0": "drop blocks, clear full rows",
}


@dataclasses.dataclass(frozen=True, init=False)
class Jumanji:
    """`jumanji.make(id)` for tasks with one reward.

    Observations become dicts (nested where jumanji's are), bool or float32. The mask of legal actions is
    "action_mask", bool:
      - `Discrete` actions: [num_values];
      - several choices with one mask over all combinations (Tetris, Sudoku): the combinations become the values of
        one `Discrete` action, in row-major order;
      - several choices with a mask each (Cleaner, JobShop): `MultiDiscrete`, the masks one after the other.

    An episode that ends with discount 0 terminated; with any other discount it was truncated. Most of jumanji's time
    limits terminate, and show the step count in the observation.

    Random transitions draw on the key that `step` is given, not on the one in jumanji's state, so that two episodes
    from the same start state differ.

    Args:
      id: such as "Game2048-v1".
      truncates: jumanji does not say whether a task can truncate. True is right for every task; False, for tasks
        that are known never to, allows same-step resets and so saves one step per episode.
      options: arguments of the task's constructor (`time_limit=50`, `generator=...`).

    Raises:
      UserError: jumanji is not installed, knows no such id, or the task is not of this kind.
    """

    id: str
    truncates: bool
    options: tuple[tuple[str, Any], ...]

    def __init__(self, id: str, truncates: bool = True, **options: Any):
        object.__setattr__(self, "id", id)
        object.__setattr__(self, "truncates", truncates)
        object.__setattr__(self, "options", adapting.freeze(options, f"jumanji/{id}"))
        _ = self.spec  # now: jumanji makes constants, which must not happen inside a traced function

    @functools.cached_property
    def made(self) -> Any:
        """jumanji's own environment."""
        try:
            from jumanji import registration
        except ImportError as error:
            raise adapting.missing("jumanji", error) from error
        registered = registration.registered_environments()
        if self.id not in registered:
            raise unknown("jumanji environment", self.id, registered, "See `podracer envs`.")
        options = dict(self.options)
        try:
            return registration.make(self.id, **options)
        except TypeError as error:
            raise adapting.bad_option(f"jumanji/{self.id}", error, options, ()) from error

    @functools.cached_property
    def _choices(self) -> tuple[int, ...] | None:
        """Numbers of values whose combinations are one `Discrete` action; None where the action is as jumanji's."""
        shape, space = self._mask_shape, self.made.action_spec
        values = _num_values(space)
        joint = values is not None and len(values) > 1 and shape == values
        return values if joint else None

    @functools.cached_property
    def _mask_shape(self) -> tuple[int, ...] | None:
        _, timestep = jax.eval_shape(self.made.reset, jax.random.key(0))
        mask = _as_dict(timestep.observation).get("action_mask")
        return None if mask is None else tuple(mask.shape)

    @functools.cached_property
    def spec(self) -> api.Spec:
        self._check_rewards()
        _, observation = jax.eval_shape(self.reset, jax.random.key(0))
        limit = getattr(self.made, "time_limit", None)
        return api.Spec(
            name=f"jumanji/{self.id}",
            observation=adapting.array_spec(observation),
            action=self._action_spec,
            truncates=self.truncates,
            max_episode_steps=None if limit is None else int(limit),
        )

    def _check_rewards(self):
        _, timestep = jax.eval_shape(self.made.reset, jax.random.key(0))
        if timestep.reward.shape != ():
            raise UserError(
                f"jumanji/{self.id} gives {timestep.reward.shape[0]} rewards, one per agent; expected one reward. "
                "Wrap it in an environment of your own that adds them up."
            )

    @functools.cached_property
    def _action_spec(self) -> api.Action:
        space, mask, values = self.made.action_spec, self._mask_shape, _num_values(self.made.action_spec)
        if self._choices:
            return api.Discrete(math.prod(self._choices))
        if values is None:
            if jnp.issubdtype(space.dtype, jnp.floating) and hasattr(space, "minimum"):
                return adapting.continuous(space.minimum, space.maximum, tuple(space.shape))
            raise UserError(
                f"jumanji/{self.id} has actions {space}; expected discrete ones or bounded floats. "
                "Wrap it in an environment of your own."
            )
        per_choice = (values[0],) if space.shape == () else (len(values), values[0])
        if mask is not None and (mask != per_choice or len(set(values)) > 1):
            raise UserError(
                f"jumanji/{self.id} has an action mask of shape {mask} for actions of {values} values; expected one "
                f"mask over all combinations, {values}, or one per choice. Wrap it in an environment of your own."
            )
        return api.Discrete(values[0]) if space.shape == () else api.MultiDiscrete(values)

    def reset(self, key):
        state, timestep = self.made.reset(key)
        return state, self._observe(timestep)

    def step(self, state, action, key):
        if hasattr(state, "key"):
            state = state.replace(key=key)
        if self._choices:
            action = jnp.stack(jnp.unravel_index(action, self._choices))
        space = self.made.action_spec
        state, timestep = self.made.step(state, action.reshape(space.shape).astype(space.dtype))
        over, on = timestep.last(), timestep.discount != 0
        reward = jnp.asarray(timestep.reward, jnp.float32)
        return state, api.Step(self._observe(timestep), reward, over & ~on, over & on)

    def _observe(self, timestep):
        observation = adapting.compact(_as_dict(timestep.observation))
        if "action_mask" in observation:
            observation["action_mask"] = observation["action_mask"].ravel()
        return observation


def _num_values(space: Any) -> tuple[int, ...] | None:
    """How many values each component of a discrete action has, or None."""
    values = getattr(space, "num_values", None)
    return None if values is None else tuple(int(n) for n in np.atleast_1d(np.asarray(values)).ravel())


def _as_dict(observation: Any) -> dict[str, Any]:
    """Named tuples and dataclasses as dicts, all the way down; a lone array under "observation"."""

    def convert(node):
        if hasattr(node, "_fields"):
            return {name: convert(getattr(node, name)) for name in node._fields}
        if dataclasses.is_dataclass(node):
            return {field.name: convert(getattr(node, field.name)) for field in dataclasses.fields(node)}
        if isinstance(node, dict):
            return {name: convert(value) for name, value in node.items()}
        return node

    converted = convert(observation)
    return converted if isinstance(converted, dict) else {"observation": converted}
