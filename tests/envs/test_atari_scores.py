"""Human-normalised scores."""

from __future__ import annotations

import pytest

from podracer.envs.atari_scores import SCORES, human_normalised
from podracer.envs.envpool import GAMES


def test_the_57_games_are_games_that_are_there():
    assert len(SCORES) == 57 and set(SCORES) <= set(GAMES)
    assert all(human > random for random, human in SCORES.values())


@pytest.mark.parametrize("game", list(SCORES))
def test_random_play_is_0_and_human_play_1(game):
    random, human = SCORES[game]
    assert human_normalised(f"atari/{game}", random) == 0 and human_normalised(f"ale/{game}", human) == 1


def test_published_examples():
    """DQN's scores in Mnih et al. 2015 (Nature), table 2: Pong 132 %, Breakout 1327 % with that paper's own numbers;
    with the field's, from 18.9 and 401.2 as below."""
    assert human_normalised("atari/Pong", 18.9) == pytest.approx((18.9 + 20.7) / 35.3)
    assert human_normalised("atari/Breakout", 401.2) == pytest.approx(13.87, abs=0.01)
    assert human_normalised("gymnasium/ALE/Pong-v5", 14.6) == 1.0
    assert human_normalised("atari/MontezumaRevenge", 0.0) == 0.0


@pytest.mark.parametrize("name", ["minatar/Breakout", "Pong", "catch", "atari/Klax", "envpool/CartPole-v1"])
def test_other_games_have_no_human_score(name):
    assert human_normalised(name, 1.0) is None
