"""Environments of envpool, stepped in C++ threads: https://github.com/sail-sg/envpool.

This adapter owns envpool's send/recv state machine, by using nothing but its blocking `reset` (once) and `step`.
What it decides: the step after an end is a reset, whatever envpool's flags say of it; a lost life is an end for the
learner but not for the score; limits are given in frames.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from podracer.envs import api, gymnasium
from podracer.envs.adapting import missing
from podracer.envs.atari_protocol import Atari, options
from podracer.envs.host import HostStep, ResetTracker
from podracer.errors import UserError, check_number, unknown

_LISTED = (
    "Adventure AirRaid Alien Amidar Assault Asterix Asteroids Atlantis Atlantis2 Backgammon BankHeist BasicMath "
    "BattleZone BeamRider Berzerk Blackjack Bowling Boxing Breakout Carnival Casino Centipede ChopperCommand "
    "CrazyClimber Crossbow Darkchambers Defender DemonAttack DonkeyKong DoubleDunk Earthworld ElevatorAction Enduro "
    "Entombed Et FishingDerby FlagCapture Freeway Frogger Frostbite Galaxian Gopher Gravitar Hangman HauntedHouse "
    "Hero HumanCannonball IceHockey Jamesbond JourneyEscape Kaboom Kangaroo KeystoneKapers KingKong Klax Koolaid "
    "Krull KungFuMaster LaserGates LostLuggage MarioBros MiniatureGolf MontezumaRevenge MrDo MsPacman NameThisGame "
    "Othello Pacman Phoenix Pitfall Pitfall2 Pong Pooyan PrivateEye Qbert Riverraid RoadRunner Robotank Seaquest "
    "SirLancelot Skiing Solaris SpaceInvaders SpaceWar StarGunner Superman Surround Tennis Tetris TicTacToe3d "
    "TimePilot Trondead Turmoil Tutankham UpNDown Venture VideoCheckers VideoChess VideoCube VideoPinball WizardOfWor "
    "WordZapper YarsRevenge Zaxxon"
)
GAMES = tuple(_LISTED.split())


def atari(game: str, num_threads: int = 0, **given: Any) -> Envpool:
    """`atari/GAME`: an Atari game with `protocol` and the fields of `Atari` as options.

    Raises:
      UserError: there is no such game or option.
    """
    if game not in GAMES:
        known = [f"atari/{name}" for name in GAMES]
        raise unknown("environment", f"atari/{game}", known, "Names are written as in atari/MsPacman.")
    return Envpool(f"{game}-v5", atari=options(f"atari/{game}", given, ("num_threads",)), num_threads=num_threads)


def task(name: str, **given: Any) -> Envpool:
    """`envpool/TASK`: any other task of envpool, with the option `num_threads`.

    Raises:
      UserError: there is no such task or option, or it is an Atari game, which has a name of its own.
    """
    if name.removesuffix("-v5") in GAMES:
        raise UserError(f"envpool/{name} is an Atari game; write atari/{name.removesuffix('-v5')}.")
    for option in given:
        if option != "num_threads":
            raise UserError(f"envpool/{name} has no option '{option}'. It has: num_threads.")
    return Envpool(name, **given)


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
        return self.task.removesuffix("-v5") in GAMES

    @functools.cached_property
    def spec(self) -> api.Spec:
        found = self._envpool_spec()
        observation = gymnasium.observations(self.name, found.observation_space).spec
        action = gymnasium.actions(self.name, found.action_space).spec
        skip = self.atari.frame_skip if self.is_atari else 1
        limit = int(found.config.max_episode_steps)
        return api.Spec(self.name, observation, action, truncates=True, max_episode_steps=limit, frame_skip=skip)

    @property
    def name(self) -> str:
        return f"atari/{self.task.removesuffix('-v5')}" if self.is_atari else f"envpool/{self.task}"

    def start(self, seeds: Sequence[int], **more: Any) -> _EnvpoolBatch:
        if len(seeds) != self.batch_size:
            raise UserError(f"{self.name}: {len(seeds)} seeds for {self.batch_size} environments; expected as many.")
        envpool = self._import()
        options = {"num_envs": self.batch_size, "seed": [int(seed) for seed in seeds], "num_threads": self.num_threads}
        return _EnvpoolBatch(envpool.make(self.task, env_type="gymnasium", **options, **self._options(), **more), self)

    def start_drawn(self, seed: int) -> _EnvpoolBatch:
        """A batch of one that can be drawn."""
        return dataclasses.replace(self, batch_size=1, num_threads=1).start([seed], render_mode="rgb_array")

    def _options(self) -> dict[str, Any]:
        if not self.is_atari:
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
            "img_height": atari.image_size,
            "img_width": atari.image_size,
        }

    def _envpool_spec(self) -> Any:
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
        # For good, not for a while: restoring filters is not safe while other threads do the same.
        warnings.filterwarnings("ignore", ".*precision lowered by casting", UserWarning)
        return envpool


class _EnvpoolBatch:
    """A running pool."""

    def __init__(self, pool: Any, recipe: Envpool):
        self._pool, self._recipe, self._atari = pool, recipe, recipe.is_atari
        size = recipe.batch_size
        self._shapes = [(size, *leaf.shape) for leaf in jax.tree.leaves(recipe.spec.observation)]
        self._limit = recipe.spec.max_episode_steps
        self._observe = gymnasium.observations(recipe.name, pool.observation_space).convert
        self._act = gymnasium.actions(recipe.name, pool.action_space).convert
        self._discrete = not isinstance(recipe.spec.action, api.Continuous)
        self._tracker = ResetTracker(size)
        self._elapsed, self._game_over = np.zeros(size, np.int64), np.zeros(size, bool)
        self._started = False

    def reset(self) -> HostStep:
        if self._started:
            raise RuntimeError("envpool must be reset once only; it resets its environments itself")
        self._started = True
        observation, _ = self._pool.reset()
        zeros = np.zeros(self._recipe.batch_size, np.float32)
        return HostStep(self._tracker.first(self._check(observation)), zeros, zeros.astype(bool))

    def step(self, action: np.ndarray) -> HostStep:
        action = self._act(np.asarray(action))
        observation, reward, terminated, truncated, info = self._pool.step(
            action.astype(np.int32) if self._discrete else action
        )
        score = np.asarray(info["reward"] if self._atari else reward, np.float32)
        learned = np.sign(reward) if self._atari and self._recipe.atari.clip_rewards else reward
        timestep = self._tracker.add(self._check(observation), learned, terminated, truncated)
        over = terminated | truncated
        if self._atari and self._recipe.atari.life_loss_ends:
            # `terminated` is also a lost life; the game itself says here whether it is over.
            over = (info["terminated"] != 0) | truncated
        game_over = over & timestep.valid
        self._check_steps(info["elapsed_step"], np.asarray(timestep.valid), game_over)
        return HostStep(timestep, np.where(timestep.valid, score, 0).astype(np.float32), game_over)

    def render(self) -> np.ndarray:
        """uint8 [height, width, 3] of the first environment; only of a batch that was started to be drawn."""
        return np.asarray(self._pool.render()[0])

    def close(self) -> None:
        self._pool.close()

    def _check(self, observation: Any) -> Any:
        observation = self._observe(observation)
        shapes = [leaf.shape for leaf in jax.tree.leaves(observation)]
        if shapes != self._shapes:
            raise UserError(
                f"{self._recipe.name} returned observations of shapes {shapes}; expected {self._shapes}. "
                "Was a pool stepped twice at once?"
            )
        return observation

    def _check_steps(self, elapsed: np.ndarray, valid: np.ndarray, game_over: np.ndarray) -> None:
        """Our account of ends against envpool's count of steps: a reset that we do not know of would show here."""
        # A reset starts the count anew, except that after a lost life the game and its count go on.
        expected = np.where(valid, self._elapsed + 1, np.where(self._game_over, 0, self._elapsed))
        late = (expected > self._limit) if self._limit else np.zeros_like(valid)
        wrong = np.flatnonzero((elapsed != expected) | late)
        if wrong.size:
            where = int(wrong[0])
            raise UserError(
                f"{self._recipe.name}: environment {where} counts {int(elapsed[where])} steps of its game, expected "
                f"{int(expected[where])} and at most {self._limit}: it ends games without saying so, or not at its "
                "limit. Report it to envpool, or leave this task."
            )
        self._elapsed, self._game_over = expected, game_over
