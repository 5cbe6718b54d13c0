"""Atari games in the vector environment of ale-py, the Arcade Learning Environment's own: `ale/GAME`.

The same games, protocols and options as `atari/GAME` (envpool), from another program: what one of them gets wrong, the
other shows. A lost life is told here from the number of lives: ale-py's own way starts the whole game anew.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from podracer.envs import api
from podracer.envs.adapting import missing
from podracer.envs.atari_protocol import Atari, options
from podracer.envs.host import HostStep, ResetTracker
from podracer.errors import UserError, check_number, unknown


def make(game: str, num_threads: int = 0, **given: Any) -> Ale:
    """`ale/GAME`: an Atari game with `protocol` and the fields of `Atari` as options."""
    return Ale(game, atari=options(f"ale/{game}", given, ("num_threads",)), num_threads=num_threads)


@dataclasses.dataclass(frozen=True)
class Ale:
    """A batch recipe for one game.

    Args:
      game: such as "MsPacman".
      batch_size: environments per actor thread.
      atari: how the game is played.
      num_threads: C++ threads per batch; 0 lets ale-py choose.

    Raises:
      UserError: ale-py is not installed or knows no such game.
    """

    game: str
    batch_size: int = 64
    atari: Atari = Atari()
    num_threads: int = 0

    def __post_init__(self):
        check_number("batch_size", self.batch_size, minimum=1)
        check_number("num_threads", self.num_threads, minimum=0)
        _ = self._rom

    @functools.cached_property
    def _rom(self) -> str:
        known = {name.replace("_", ""): name for name in _library().roms.get_all_rom_ids()}
        if self.game.lower() not in known:
            games = ["".join(word.capitalize() for word in name.split("_")) for name in known.values()]
            raise unknown("Atari game", self.game, games, "Names are written as in ale/MsPacman.")
        return known[self.game.lower()]

    @functools.cached_property
    def spec(self) -> api.Spec:
        pool = self._make(1, 1)
        try:
            return api.Spec(
                f"ale/{self.game}",
                api.Array(tuple(pool.single_observation_space.shape), np.dtype(np.uint8)),
                api.Discrete(int(pool.single_action_space.n)),
                truncates=True,
                max_episode_steps=self.atari.max_episode_frames // self.atari.frame_skip,
                frame_skip=self.atari.frame_skip,
            )
        finally:
            pool.close()

    def start(self, seeds: Sequence[int]) -> _Batch:
        if len(seeds) != self.batch_size:
            raise UserError(
                f"ale/{self.game}: {len(seeds)} seeds for {self.batch_size} environments; expected as many."
            )
        return _Batch(self._make(self.batch_size, self.num_threads), self, seeds)

    def start_drawn(self, seed: int) -> _Batch:
        """A batch of one that can be drawn."""
        return dataclasses.replace(self, batch_size=1, num_threads=1).start([seed])

    def _make(self, num_envs: int, num_threads: int) -> Any:
        atari = self.atari
        return _library().vector_env.AtariVectorEnv(
            self._rom,
            num_envs,
            num_threads=num_threads,
            max_num_frames_per_episode=atari.max_episode_frames,
            repeat_action_probability=atari.sticky_actions,
            full_action_space=atari.full_actions,
            autoreset_mode="NextStep",
            img_height=atari.image_size,
            img_width=atari.image_size,
            stack_num=atari.stack,
            frameskip=atari.frame_skip,
            noop_max=atari.max_no_ops,
            # The score is not clipped, so we clip, and lives are told from their number.
            episodic_life=False,
            reward_clipping=False,
        )


class _Batch:
    """A running vector environment."""

    def __init__(self, pool: Any, recipe: Ale, seeds: Sequence[int]):
        self._pool, self._atari, self._seeds = pool, recipe.atari, np.asarray(seeds, np.int32)
        self._tracker = ResetTracker(len(seeds))
        self._lives = np.zeros(len(seeds), np.int32)
        self._newest: Any = None
        self._closed = False

    def reset(self) -> HostStep:
        observation, info = self._pool.reset(seed=self._seeds)
        self._lives = np.array(info["lives"])
        zeros = np.zeros(len(self._seeds), np.float32)
        return HostStep(self._tracker.first(self._kept(observation)), zeros, zeros.astype(bool))

    def step(self, action: np.ndarray) -> HostStep:
        observation, score, terminated, truncated, info = self._pool.step(np.asarray(action, np.int64))
        score = np.asarray(score, np.float32)
        learned = np.sign(score) if self._atari.clip_rewards else score
        timestep = self._tracker.add(self._kept(observation), learned, terminated, truncated)
        game_over = (terminated | truncated) & timestep.valid
        lives = np.array(info["lives"])
        if self._atari.life_loss_ends:
            lost = (lives < self._lives) & timestep.valid & ~game_over
            # The game goes on with the next action: this observation is the last of an episode and the first of one.
            timestep = timestep._replace(
                discount=np.where(lost, np.float32(0), timestep.discount), first=timestep.first | lost
            )
        self._lives = lives
        return HostStep(timestep, np.where(timestep.valid, score, np.float32(0)), game_over)

    def render(self) -> np.ndarray:
        """uint8 [height, width, 3]: the newest frame of the first environment, as agents see it, twice the size."""
        return np.repeat(self._newest[0, -1][..., None], 3, -1).repeat(2, 0).repeat(2, 1)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._pool.close()

    def _kept(self, observation: np.ndarray) -> np.ndarray:
        self._newest = observation
        return observation


def _library() -> Any:
    try:
        import ale_py
        import ale_py.roms
        import ale_py.vector_env
    except ImportError as error:
        raise missing("ale-py", error) from error
    return ale_py
