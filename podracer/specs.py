"""Specs: what an agent or a network must know of an environment before it sees one."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

PyTree = Any

# In an observation that is a dict: the environment's own state, for agents that plan with the environment itself.
STATE = "environment_state"
_NOT_FEATURES = frozenset(("action_mask", STATE))


@dataclasses.dataclass(frozen=True)
class Array:
    """Shape and dtype of one observation leaf, without the batch axis."""

    shape: tuple[int, ...]
    dtype: Any = np.float32


@dataclasses.dataclass(frozen=True)
class Discrete:
    """One of `num_values` actions, an int32 scalar."""

    num_values: int


@dataclasses.dataclass(frozen=True)
class MultiDiscrete:
    """One of `num_values[i]` for each i, an int32 vector of that length."""

    num_values: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Continuous:
    """A float32 vector. `low` and `high` bound each component; infinities mean unbounded.

    Agents act in units of [-1, 1] per bounded component; `batch.py` rescales to the bounds and clips.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]

    @property
    def size(self) -> int:
        return len(self.low)


Action = Discrete | MultiDiscrete | Continuous


@dataclasses.dataclass(frozen=True)
class Spec:
    """What an agent must know of an environment before it sees one.

    Attributes:
      name: what is printed and stored.
      observation: a pytree (array or dict) of `Array`. A leaf named "action_mask" in a dict, bool
        [num_values], marks the legal actions of a `Discrete` action; networks do not see it, policies obey it.
      action: `Discrete`, `MultiDiscrete` or `Continuous`.
      truncates: episodes can be cut without terminating (a time limit). Such environments are reset in
        next-step mode, so that the value of the true final observation can be bootstrapped.
      max_episode_steps: the time limit in steps where there is one; evaluation uses it as its cap.
      frame_skip: emulator frames per step; `frames` = `steps` x this.
      alternating: self-play of two who take turns: each step is a move of the player to move, who sees the
        observation and earns the reward, and the next step is the other's. A state that is worth v to the player to
        move is worth -v to the one who moved before.
      model: the environment itself, where agents are to plan with it (`envs.WithState`); None for others.
    """

    name: str
    observation: PyTree
    action: Action
    truncates: bool = False
    max_episode_steps: int | None = None
    frame_skip: int = 1
    alternating: bool = False
    model: Any = None


def features(observation: PyTree) -> PyTree:
    """The observation without its action mask and its environment's state: what networks look at."""
    if isinstance(observation, dict) and not _NOT_FEATURES.isdisjoint(observation):
        rest = {name: leaf for name, leaf in observation.items() if name not in _NOT_FEATURES}
        return rest["observation"] if set(rest) == {"observation"} else rest
    return observation


def without_state(observation: PyTree) -> PyTree:
    """The observation without its environment's state: what is worth keeping."""
    if isinstance(observation, dict) and STATE in observation:
        return {name: leaf for name, leaf in observation.items() if name != STATE}
    return observation


def action_mask(observation: PyTree) -> Any | None:
    """The legal actions [..., num_values] bool, or None where every action is legal."""
    return observation.get("action_mask") if isinstance(observation, dict) else None
