"""Matches: who moved first, who won, what it says of strength; and the players whose strength is known."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muzero import arena, players
from muzero.arena import Match
from podracer import envs
from podracer.errors import UserError
from tests.contracts.agents import fast_jit

pytestmark = pytest.mark.loose_rank  # pgx and mctx broadcast arrays of different rank


@pytest.fixture(autouse=True)
def quickly_compiled(monkeypatch):
    """Matches here are short: compiling is what takes time."""
    monkeypatch.setattr(arena.jax, "jit", fast_jit)


GAME = arena.board_game(envs.make("pgx/tic_tac_toe"))


def _by_position(last):
    def act(params, state, timestep, key):
        mask = timestep.observation["action_mask"]
        action = 8 - jnp.argmax(mask[:, ::-1], -1) if last else jnp.argmax(mask, -1)
        return action.astype(jnp.int32), state

    return act


FIRST_CELL, LAST_CELL = (players.Player(name, _by_position(name == "last")) for name in ("first", "last"))


def test_results_belong_to_the_one_player_whoever_moves_first():
    """Both take the first free cell: X gets 0, 2, 4, 6 and wins with its seventh move, 6."""
    result = arena.match(GAME, FIRST_CELL, FIRST_CELL, 4)
    np.testing.assert_array_equal(result.first, [1, 1])
    np.testing.assert_array_equal(result.second, [-1, -1])
    assert result.score == 0.5
    # 0 1 2 against 8 7: whoever moves first has the first row, or the last one.
    result = arena.match(GAME, FIRST_CELL, LAST_CELL, 4)
    np.testing.assert_array_equal(result, [[1, 1], [-1, -1]])


def test_openings_make_games_differ_and_are_the_same_for_both_sides():
    result = arena.match(GAME, FIRST_CELL, FIRST_CELL, 40, seed=3, opening=3)
    assert len(set(result.first.tolist())) > 1
    np.testing.assert_array_equal(result.first, -result.second)


def test_the_solution_of_tic_tac_toe():
    """5,478 positions; the first move is a draw everywhere, and minimax never loses."""
    value, best = players.tic_tac_toe()
    assert value[0] == 0 and best[0].all()
    assert (best.any(-1)).sum() == 4520 and np.abs(value).max() == 1
    result = arena.match(GAME, players.minimax(), players.random_player(), 60)
    assert min(result.first.min(), result.second.min()) == 0 and result.score > 0.8


def test_random_games_are_worth_what_they_bring():
    """The mean over many rollouts from an empty board is the first player's known advantage, 0.585 - 0.288."""
    _, seen = jax.vmap(GAME.reset)(jax.random.split(jax.random.key(0), 4000))
    worth = np.asarray(jax.jit(lambda seen, key: players.rollout(GAME.spec, seen, key))(seen, jax.random.key(1)))
    assert set(worth.tolist()) == {-1.0, 0.0, 1.0}
    assert worth.mean() == pytest.approx(0.585 - 0.288, abs=0.05)


def test_ratings_are_those_of_bradley_and_terry():
    """400 points are ten wins to one; draws count half; who won everything stays finite."""
    points = np.array([[0, 1000], [100, 0]])
    ratings = arena.elo(points)
    assert ratings[0] - ratings[1] == pytest.approx(400, abs=2) and ratings.sum() == pytest.approx(0, abs=1e-6)
    strength = 10 ** (np.array([0, 100, -50, 300]) / 400)
    share = strength[:, None] / (strength[:, None] + strength)
    points = 1e5 * share * (1 - np.eye(4))
    np.testing.assert_allclose(np.diff(arena.elo(points)), [100, -150, 350], atol=0.1)
    swept = arena.elo(np.array([[0, 10], [0, 0]]))
    assert np.isfinite(swept).all() and swept[0] - swept[1] > 400


def test_a_tournament_counts_every_pair():
    names = [FIRST_CELL, FIRST_CELL._replace(name="again"), LAST_CELL]
    points, ratings = arena.tournament(GAME, names, 20)
    np.testing.assert_array_equal(points + points.T, 20 * (1 - np.eye(3)))
    assert ratings[0] == pytest.approx(ratings[1], abs=1)  # they are the same player


def test_the_table_says_what_was_counted():
    result = Match(np.array([1, 1, 0, -1]), np.array([1, 0, -1, -1]))
    lines = [line.split() for line in arena.table(result).splitlines()]
    assert lines[1][:6] == ["moves", "first", "2", "1", "1", "0.625"]
    assert lines[2][:6] == ["moves", "second", "1", "1", "2", "0.375"]
    assert lines[3][:5] == ["total", "3", "2", "3", "0.500"]
    np.testing.assert_allclose(arena.interval(0.9, 100), [0.8256, 0.9448], atol=1e-4)


def test_what_cannot_be_is_refused_in_one_line():
    with pytest.raises(UserError, match=r"games is 5; expected an even number"):
        arena.match(GAME, FIRST_CELL, FIRST_CELL, 5)
    for name in ("mcts:x", "minmax", "mcts:0"):
        with pytest.raises(UserError, match=r"the opponent is|simulations is 0"):
            players.opponent(name, GAME.spec)
    with pytest.raises(UserError, match=r"the opponent is 'minimax'; expected random"):
        players.opponent("minimax", arena.board_game(envs.make("pgx/connect_four")).spec)
    for env in (envs.Catch(), envs.make("pgx/backgammon")):
        with pytest.raises(UserError, match=r"is no game in which two players take turns; expected one"):
            arena.board_game(env)
