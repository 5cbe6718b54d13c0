"""Environments of envpool, stepped in C++ threads: https://github.com/sail-sg/envpool.

This adapter owns envpool's send/recv state machine, by using nothing but its blocking `reset` (once) and `step`.
What it decides: the step after an end is a reset, whatever envpool's flags say of it; a lost life is an end for the
learner but not for the score; limits are given in frames.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from podracer.envs import api
from podracer.envs.adapting import missing
from podracer.envs.host import HostStep, ResetTracker
from podracer.errors import UserError, check_number, unknown


@dataclasses.dataclass(frozen=True)
class Atari:
    """How the Atari games are played; the defaults are the protocol of Machado et al. 2018."""

    sticky_actions: float = 0.25
    """Probability that the emulator repeats the previous action."""
    full_actions: bool = True
    """All 18 actions instead of those that do something in the game."""
    life_loss_ends: bool = False
    """A lost life ends the episode for the learner; the score goes on."""
    clip_rewards: bool = True
    """Learn from the sign of the reward; the score is not clipped."""
    max_no_ops: int = 1
    """Up to this many random no-ops at the start of a game."""
    max_episode_frames: int = 108_000
    """Emulator frames after which a game is cut."""
    frame_skip: int = 4
    """Frames per action; the last two are merged by their maximum."""
    stack: int = 4
    """Frames per observation, one plane each."""

    def __post_init__(self):
        check_number("sticky_actions", self.sticky_actions, minimum=0, maximum=1)
        for name in ("max_no_ops", "frame_skip", "stack", "max_episode_frames"):
            check_number(name, getattr(self, name), minimum=1)
        if self.max_episode_frames % self.frame_skip:
            raise UserError(
                f"max_episode_frames is {self.max_episode_frames}; expected a multiple of frame_skip = "
                f"{self.frame_skip}. Change one of them."
            )


# The protocol of Mnih et al. 2015 and most papers after it.
CLASSIC_ATARI = Atari(sticky_actions=0.0, full_actions=False, life_loss_ends=True, clip_rewards=True, max_no_ops=30)


@dataclasses.dataclass(frozen=True)
class Envpool:
    """A batch recipe for one envpool task.

    Args:
      task: envpool's name, e.g. "Pong-v5" or "CartPole-v1".
      batch_size: environments per actor thread.
      atari: how Atari games are played; ignored elsewhere.
      num_threads: C++ threads per batch; 0 lets envpool choose.
    """

    task: str
    batch_size: int = 64
    atari: Atari = Atari()
    num_threads: int = 0

    def __post_init__(self):
        check_number("batch_size", self.batch_size, minimum=1)
        check_number("num_threads", self.num_threads, minimum=0)
        self._known()

    @property
    def is_atari(self) -> bool:
        return "frame_skip" in self._envpool_spec().config._fields and hasattr(
            self._envpool_spec().config, "repeat_action_probability"
        )

    @property
    def spec(self) -> api.Spec:
        from gymnasium import spaces

        found = self._envpool_spec()
        observation = api.Array(found.observation_space.shape, found.observation_space.dtype)
        action = found.action_space
        if isinstance(action, spaces.Discrete):
            ours: Any = api.Discrete(int(action.n))
        else:
            low, high = np.ravel(action.low), np.ravel(action.high)
            ours = api.Continuous(tuple(map(float, low)), tuple(map(float, high)))
        skip = self.atari.frame_skip if self.is_atari else 1
        limit = int(found.config.max_episode_steps)
        return api.Spec(self.name, observation, ours, truncates=True, max_episode_steps=limit, frame_skip=skip)

    @property
    def name(self) -> str:
        return f"atari/{self.task.removesuffix('-v5')}" if self.is_atari else f"envpool/{self.task}"

    def start(self, seeds: Sequence[int]) -> _EnvpoolBatch:
        if len(seeds) != self.batch_size:
            raise UserError(f"{self.name}: {len(seeds)} seeds for {self.batch_size} environments; expected as many.")
        envpool = self._import()
        options = {"num_envs": self.batch_size, "seed": [int(seed) for seed in seeds], "num_threads": self.num_threads}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # gymnasium on the precision of bounds
            pool = envpool.make(self.task, env_type="gymnasium", **options, **self._options())
        return _EnvpoolBatch(pool, self)

    def _options(self) -> dict[str, Any]:
        if "-v5" not in self.task:
            return {}
        atari = self.atari
        return {
            "repeat_action_probability": atari.sticky_actions,
            "full_action_space": atari.full_actions,
            "episodic_life": atari.life_loss_ends,
            "reward_clip": False,  # we clip, so that the score needs no second channel
            "noop_max": atari.max_no_ops,
            "max_episode_steps": atari.max_episode_frames // atari.frame_skip,
            "frame_skip": atari.frame_skip,
            "stack_num": atari.stack,
        }

    def _envpool_spec(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self._import().make_spec(self.task, **self._options())

    def _known(self) -> None:
        tasks = self._import().list_all_envs()
        if self.task not in tasks:
            raise unknown("envpool task", self.task, tasks, "`envpool.list_all_envs()` lists them.")

    @staticmethod
    def _import() -> Any:
        try:
            import envpool
        except ImportError as error:
            raise missing("envpool", error) from error
        return envpool


class _EnvpoolBatch:
    """A running pool."""

    def __init__(self, pool: Any, recipe: Envpool):
        self._pool, self._recipe, self._atari = pool, recipe, recipe.is_atari
        spec = recipe.spec
        self._shape = (recipe.batch_size, *spec.observation.shape)
        self._limit = spec.max_episode_steps
        self._continuous = spec.action if isinstance(spec.action, api.Continuous) else None
        self._tracker = ResetTracker(recipe.batch_size)
        self._game_over = np.zeros(recipe.batch_size, bool)
        self._started = False

    def reset(self) -> HostStep:
        if self._started:
            raise RuntimeError("envpool must be reset once only; it resets its environments itself")
        self._started = True
        observation, _ = self._pool.reset()
        zeros = np.zeros(self._recipe.batch_size, np.float32)
        return HostStep(self._tracker.first(self._check(observation)), zeros, zeros.astype(bool))

    def step(self, action: np.ndarray) -> HostStep:
        observation, reward, terminated, truncated, info = self._pool.step(self._action(action))
        score = np.asarray(info["reward"] if self._atari else reward, np.float32)
        learned = np.sign(reward) if self._atari and self._recipe.atari.clip_rewards else reward
        timestep = self._tracker.add(self._check(observation), learned, terminated, truncated)
        over = terminated | truncated
        if self._atari and self._recipe.atari.life_loss_ends:
            # `terminated` is also a lost life; the game itself says here whether it is over.
            over = (info["terminated"] != 0) | truncated
        return HostStep(timestep, np.where(timestep.valid, score, 0).astype(np.float32), over & timestep.valid)

    def close(self) -> None:
        self._pool.close()

    def _action(self, action: np.ndarray) -> np.ndarray:
        if self._continuous is None:
            return np.asarray(action, np.int32)
        low, high = np.asarray(self._continuous.low), np.asarray(self._continuous.high)
        return np.clip((low + high) / 2 + (high - low) / 2 * action, low, high).astype(np.float32)

    def _check(self, observation: np.ndarray) -> np.ndarray:
        if observation.shape != self._shape:
            raise UserError(
                f"{self._recipe.name} returned observations of shape {observation.shape}; expected {self._shape}. "
                "Was a pool stepped twice at once?"
            )
        return observation
