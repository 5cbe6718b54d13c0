"""ale-py's vector environment: lives, cut games, scores, and that it plays the same game as envpool."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from podracer import envs
from podracer.envs.atari_protocol import CLASSIC_ATARI
from podracer.errors import UserError

pytest.importorskip("ale_py")


def breakout(**changes):
    return envs.Ale("Breakout", 2, dataclasses.replace(CLASSIC_ATARI, max_no_ops=1, **changes), 1)


def test_a_lost_life_ends_the_episode_but_not_the_game():
    """The observation after it is the last of an episode and the first of the next; nothing is a reset."""
    batch = breakout().start([3, 4])
    batch.reset()
    lost, games, resets = np.zeros(2, int), np.zeros(2, int), np.zeros(2, int)
    for number in range(400):
        step = batch.step(np.full(2, 1 if number % 10 == 0 else 0, np.int32))  # fire now and then
        life = (step.timestep.discount == 0) & ~step.game_over
        assert (step.timestep.first[life] & step.timestep.valid[life]).all()
        lost, games, resets = lost + life, games + step.game_over, resets + ~step.timestep.valid
        if (resets >= 1).all():
            break
    batch.close()
    assert (games == 1).all() and (lost == 4).all() and (resets == 1).all()


def test_a_cut_game_with_lives_left_closes_the_score_and_keeps_the_value():
    batch = breakout(max_episode_frames=80).start([3, 4])
    batch.reset()
    for number in range(1, 21):
        step = batch.step(np.zeros(2, np.int32))
        assert step.game_over.all() == (number == 20)
    assert (step.timestep.discount == 1).all()
    after = batch.step(np.zeros(2, np.int32))
    assert after.timestep.first.all() and not after.timestep.valid.any() and not after.game_over.any()
    batch.close()


def test_scores_are_not_clipped_and_arrays_stay():
    """Random play of SpaceInvaders: rewards are signs of the score; what was returned is not written to."""
    batch = envs.Ale("SpaceInvaders", 3, num_threads=1).start([1, 2, 3])
    rng, kept = np.random.default_rng(0), [batch.reset()]
    for _ in range(120):
        kept.append(batch.step(rng.integers(0, 18, 3)))
    copies = [step.timestep.observation.copy() for step in kept[:5]]
    for _ in range(3):
        batch.step(np.zeros(3, np.int32))
    assert all(np.array_equal(a.timestep.observation, b) for a, b in zip(kept, copies))
    scores = np.stack([step.score for step in kept])
    assert scores.max() >= 5
    assert np.array_equal(np.stack([step.timestep.reward for step in kept]), np.sign(scores))
    assert batch.render().shape == (168, 168, 3)
    batch.close()


def test_it_has_the_specs_of_envpool():
    pytest.importorskip("envpool")
    for game in ("MsPacman", "Pong"):
        for protocol in ("machado", "classic"):
            ours = envs.make(f"ale/{game}", protocol=protocol).spec
            theirs = envs.make(f"atari/{game}", protocol=protocol).spec
            assert dataclasses.replace(ours, name="") == dataclasses.replace(theirs, name="")


def test_unknown_games_are_answered_with_the_nearest():
    with pytest.raises(UserError, match=r"unknown Atari game 'MsPacmen'. Did you mean 'MsPacman'"):
        envs.make("ale/MsPacmen")
    with pytest.raises(UserError, match="ale/Pong has no option 'lives'"):
        envs.make("ale/Pong", lives=3)
