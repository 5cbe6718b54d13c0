"""The envpool adapter: resets are masked, ends are told apart, arrays stay as they are."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from podracer.envs import api
from podracer.envs.atari_protocol import CLASSIC_ATARI, Atari
from podracer.envs.envpool import Envpool, _EnvpoolBatch
from podracer.envs.host import ResetTracker
from podracer.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_reset_tracker_against_a_numpy_loop():
    """Random ends: each environment alternates between steps and, after an end, exactly one reset."""
    rng = np.random.default_rng(0)
    tracker = ResetTracker(6)
    assert tracker.first(None).first.all()
    over = [False] * 6
    for _ in range(200):
        reward = rng.normal(size=6).astype(np.float32)
        terminated, truncated = rng.random(6) < 0.2, rng.random(6) < 0.2
        step = tracker.add(None, reward, terminated, truncated)
        for i in range(6):
            if over[i]:
                assert step.first[i] and not step.valid[i] and step.reward[i] == 0 and step.discount[i] == 1
                over[i] = False
            else:
                assert not step.first[i] and step.valid[i] and step.reward[i] == reward[i]
                assert step.discount[i] == (0 if terminated[i] else 1)
                over[i] = bool(terminated[i] or truncated[i])


def test_cartpole_returns_and_truncation():
    """Every game's score is its number of real steps; cut games keep discount 1."""
    batch = Envpool("CartPole-v1", 4, num_threads=1).start([1, 2, 3, 4])
    step, lengths, ended = batch.reset(), np.zeros(4), 0
    for _ in range(120):
        step = batch.step(np.zeros(4, np.int32))
        lengths += step.timestep.valid
        for i in np.flatnonzero(step.game_over):
            assert 7 < lengths[i] < 15 and step.timestep.discount[i] == 0
            lengths[i], ended = 0, ended + 1
    batch.close()
    assert ended > 20


@pytest.mark.slow
@pytest.mark.parametrize("size", [128])
def test_large_batches_and_no_aliasing(size):
    """What was returned is not overwritten by later steps."""
    batch = Envpool("Pong-v5", size, num_threads=2).start(list(range(size)))
    kept = [batch.reset()]
    for number in range(3):
        kept.append(batch.step(np.full(size, number, np.int32)))
    copies = [step.timestep.observation.copy() for step in kept]
    for number in range(3):
        batch.step(np.full(size, number, np.int32))
    for step, copy in zip(kept, copies, strict=True):
        assert np.array_equal(step.timestep.observation, copy)
    batch.close()


def test_a_lost_life_ends_the_episode_but_not_the_score():
    """Breakout without moving: five lives, one score."""
    batch = Envpool("Breakout-v5", 2, CLASSIC_ATARI, 1).start([3, 4])
    batch.reset()
    lives_lost, games = np.zeros(2, int), np.zeros(2, int)
    for number in range(900):
        step = batch.step(np.full(2, 1 if number % 10 == 0 else 0, np.int32))  # fire now and then
        lives_lost += (step.timestep.discount == 0) & step.timestep.valid
        games += step.game_over
        if games.all():
            break
    batch.close()
    assert (games >= 1).all() and (lives_lost >= 4 * games).all()


def test_a_cut_game_with_lives_left_closes_the_score_and_keeps_the_value():
    batch = Envpool("Breakout-v5", 2, Atari(max_episode_frames=80, life_loss_ends=True), 1).start([3, 4])
    batch.reset()
    for number in range(1, 21):
        step = batch.step(np.zeros(2, np.int32))
        assert step.game_over.all() == (number == 20)
    assert (step.timestep.discount == 1).all()
    after = batch.step(np.zeros(2, np.int32))
    assert after.timestep.first.all() and not after.timestep.valid.any() and not after.game_over.any()
    batch.close()


def test_frames_have_the_size_that_was_asked_for():
    recipe = Envpool("Pong-v5", 2, Atari(image_size=42, stack=2), 1)
    assert recipe.spec.observation.shape == (2, 42, 42)
    batch = recipe.start([1, 2])
    assert batch.reset().timestep.observation.shape == (2, 2, 42, 42)
    batch.close()


class ScriptedPool:
    """What envpool says of Breakout with life loss as an end, for games whose lives have chosen lengths.

    A game is a list of lives' lengths, and whether it is cut in the middle of its last one instead of lost. The step
    after an end is a reset: of the life only (the count of steps stays), or of the whole game.
    """

    GAMES = (([2, 1, 3], False), ([1, 4], True), ([3], False), ([1, 1], True))

    def __init__(self, size, recipe):
        self.made = recipe._envpool_spec()
        self.observation_space, self.action_space = self.made.observation_space, self.made.action_space
        self.shape = (size, *self.observation_space.shape)
        self.game, self.life, self.at, self.elapsed, self.over = (np.zeros(size, int) for _ in range(5))
        self.game += np.arange(size)

    def reset(self):
        return np.zeros(self.shape, np.uint8), {}

    def step(self, action):
        size = len(action)
        reward, terminated, truncated, lost = (np.zeros(size, kind) for kind in (np.float32, bool, bool, np.int32))
        for i in range(size):
            lives, cut = self.GAMES[self.game[i] % len(self.GAMES)]
            if self.over[i]:
                self.life[i], self.at[i] = self.life[i] + 1, 0
                if self.over[i] == 2:
                    self.game[i], self.life[i], self.elapsed[i] = self.game[i] + 1, 0, 0
                self.over[i] = 0
                reward[i] = 99.0  # an emulator may report anything here; it is nobody's
                continue
            self.at[i], self.elapsed[i], reward[i] = self.at[i] + 1, self.elapsed[i] + 1, 3.0 + action[i]
            if self.at[i] == lives[self.life[i]]:
                last = self.life[i] == len(lives) - 1
                truncated[i], terminated[i], lost[i] = last and cut, not (last and cut), last and not cut
                self.over[i] = 2 if last else 1
        info = {"reward": reward, "terminated": lost, "elapsed_step": self.elapsed.copy()}
        return np.zeros(self.shape, np.uint8), reward, terminated, truncated, info


def test_scores_are_those_of_games_and_ends_those_of_lives_against_numpy():
    """Lives lost with others left, games cut with lives left: what is learned ends, what is counted does not."""
    size, length = 5, 60
    recipe = Envpool("Breakout-v5", size, dataclasses.replace(CLASSIC_ATARI, image_size=8, stack=1))
    batch = _EnvpoolBatch(ScriptedPool(size, recipe), recipe)
    actions = np.random.default_rng(0).integers(0, 4, (length, size))
    steps = [batch.reset(), *(batch.step(action) for action in actions)]
    scores = np.cumsum([step.score for step in steps], 0)
    for i in range(size):
        t, before, game = 0, 0.0, i
        while True:
            lives, cut = ScriptedPool.GAMES[game % len(ScriptedPool.GAMES)]
            earned = 0.0
            for number, life in enumerate(lives):
                for at in range(1, life + 1):
                    t += 1
                    if t > length:
                        break
                    step, last = steps[t], at == life
                    over, end = last and number == len(lives) - 1, last and not (cut and number == len(lives) - 1)
                    earned += 3.0 + actions[t - 1, i]
                    assert step.timestep.valid[i] and not step.timestep.first[i] and step.timestep.reward[i] == 1.0
                    assert step.timestep.discount[i] == (0.0 if end else 1.0) and step.game_over[i] == over
                    assert step.score[i] == 3.0 + actions[t - 1, i]
                t += 1  # the reset
                if t > length:
                    break
                assert steps[t].timestep.first[i] and not steps[t].timestep.valid[i] and steps[t].score[i] == 0.0
            if t > length:
                break
            assert scores[t, i] - before == earned
            before, game = scores[t, i], game + 1


def test_dicts_and_boxes_of_other_tasks():
    """Observations of several parts, float64, bounded actions."""
    grid = Envpool("MiniGrid-Empty-5x5-v0", 2, num_threads=1)
    assert set(grid.spec.observation) == {"direction", "image", "mission"} and grid.spec.action.num_values == 7
    batch = grid.start([1, 2])
    seen = batch.reset().timestep.observation
    assert seen["image"].shape == (2, 7, 7, 3) and seen["direction"].shape == (2, 4)
    batch.step(np.array([0, 2], np.int32))
    batch.close()
    pendulum = Envpool("Pendulum-v1", 2, num_threads=1)
    assert pendulum.spec.action == api.Continuous((-2.0,), (2.0,))
    batch = pendulum.start([1, 2])
    assert batch.reset().timestep.observation.dtype == np.float32
    assert (batch.step(np.ones((2, 1), np.float32)).score < 0).all()
    batch.close()


def test_a_game_that_starts_anew_without_saying_so_is_reported():
    """Or one that goes on beyond its limit."""
    batch = Envpool("CartPole-v1", 2, num_threads=1).start([1, 2])
    batch.reset()
    batch._check_steps(np.array([1, 1]), np.ones(2, bool), np.zeros(2, bool))
    with pytest.raises(UserError, match="envpool/CartPole-v1: environment 1 counts 0 steps of its game, expected 2"):
        batch._check_steps(np.array([2, 0]), np.ones(2, bool), np.zeros(2, bool))
    batch._limit = 1
    with pytest.raises(UserError, match="environment 0 counts 2 steps of its game, expected 2 and at most 1"):
        batch._check_steps(np.array([2, 2]), np.ones(2, bool), np.zeros(2, bool))
    batch.close()


def test_a_picture_of_a_game():
    batch = Envpool("Pong-v5").start_drawn(1)
    batch.reset()
    assert batch.render().shape == (210, 160, 3) and batch.render().dtype == np.uint8
    batch.close()


def test_bad_tasks_and_limits_are_refused():
    with pytest.raises(UserError, match="Did you mean 'Pong-v5'"):
        Envpool("Pongg-v5")
    with pytest.raises(UserError, match="multiple of frame_skip"):
        Atari(max_episode_frames=1001)
    with pytest.raises(UserError, match="image_size"):
        Atari(image_size=0)
    with pytest.raises(UserError, match="3 seeds for 4 environments"):
        Envpool("CartPole-v1", 4).start([1, 2, 3])
