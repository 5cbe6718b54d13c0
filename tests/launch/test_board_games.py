"""Board games on the command line: training by self-play, matches, and a game against the agent."""

from __future__ import annotations

import json

import pytest

from launch.play import Board
from muzero import arena
from tests.contracts.agents import fast_jit
from tests.launch.test_cli import TINY, command, mistake, podracer  # noqa: F401  # fixtures

pytestmark = [pytest.mark.slow, pytest.mark.loose_rank]


@pytest.fixture(autouse=True)
def quickly_compiled(monkeypatch):
    """Matches here are short: compiling is what takes time."""
    monkeypatch.setattr(arena.jax, "jit", fast_jit)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of one call."""
    folder = tmp_path_factory.mktemp("runs") / "game"
    small = ["--agent.num-simulations", 2, "--agent.sequence-length", 5, "--agent.replay-steps", 400]
    small += ["--agent.min-replay", 10, "--agent.batch-size", 8, "--network.width", 4, "--network.head-width", 4]
    arguments = ["--env", "pgx/tic_tac_toe", "--agent", "alphazero", *small, *TINY, "--eval-episodes", 4]
    done = command("train", "anakin", *arguments, "--evaluations", 1, "--total-steps", 40, "--run", folder)
    assert done.returncode == 0, done.stderr
    assert "alphazero on pgx/tic_tac_toe  100%" in done.stderr
    return folder


def test_a_run_of_self_play_is_measured_resumed_and_matched(run, podracer, mistake):  # noqa: F811
    """By games against a random player in plain evaluations, and against whom one names."""
    content = json.loads((run / "config.json").read_text())
    assert content["recipe"]["env"] == "pgx/tic_tac_toe" and content["recipe"]["agent"] == "alphazero"
    status, out, _ = podracer("eval", run, "--episodes", 8, "--json", "True")
    found = json.loads(out)
    # Both players' rewards together would be 1 for every game that somebody wins.
    assert status == 0 and -1 <= found["return_mean"] < 1 and found["length_mean"] <= 5
    status, out, _ = podracer("eval", run, "--against", "minimax", "--games", 4, "--simulations", 1)
    lines = out.splitlines()
    assert status == 0 and "(step 40) on pgx/tic_tac_toe against minimax, 4 games" in lines[0]
    assert sum(map(int, lines[-1].split()[1:4])) == 4
    assert "games is 3; expected an even number" in mistake("eval", run, "--against", "random", "--games", 3)
    assert "the opponent is 'minmax'" in mistake("eval", run, "--against", "minmax")
    assert "is finished" in mistake("resume", run)


def test_checkpoints_are_rated_by_games_among_them(run, podracer):  # noqa: F811
    status, out, _ = podracer("eval", run, "--against", "earlier", "--games", 2)
    rows = [line.rsplit(maxsplit=2) for line in out.splitlines()[2:]]
    assert status == 0 and {row[0] for row in rows} == {"step 40", "random"}
    assert sum(float(row[1]) for row in rows) == pytest.approx(0, abs=2)


def test_a_game_is_played_from_a_pipe(run):
    """What is no move, and what is not possible, is asked for again; the end of the input ends the game."""
    typed = "b2\nb2\nz9\n\na1\na2\na3\nb1\nb3\nc1\nc2\nc3\n"
    done = command("play", "pgx/tic_tac_toe", run, input=typed)
    assert done.returncode == 0 and done.stderr == ""
    assert "b2 is not possible here; expected" in done.stdout
    assert "'z9' is no move; expected a place such as b2. Try again." in done.stdout
    assert done.stdout.splitlines()[-1] in ("you win", "alphazero wins", "a draw")
    done = command("play", "pgx/tic_tac_toe", run, "--first", "agent", input="")
    assert done.returncode == 0 and done.stdout.startswith("alphazero plays ")
    assert done.stdout.splitlines()[-1] == "game left"


def test_mistakes_with_games_are_one_line(run, mistake):  # noqa: F811
    assert "play needs a game and a run directory" in mistake("play", run)
    assert "was trained on pgx/tic_tac_toe; expected pgx/connect_four" in mistake("play", "pgx/connect_four", run)
    assert "unknown board game 'pgx/conect_four'. Did you mean" in mistake("play", "pgx/conect_four", run)
    assert "--first" in mistake("play", "pgx/tic_tac_toe", run, "--first", "me")


def test_moves_are_read_as_they_are_written():
    for board in (Board(3, 3, 9), Board(6, 7, 7), Board(9, 9, 82)):
        names = [board.name(action) for action in range(board.num_actions)]
        assert [board.action(name) for name in names] == list(range(board.num_actions))
        for text in ("", "0", "10", "a0", "a99", "k1", "x", "pas"):
            assert board.action(text) is None
    assert Board(3, 3, 9).action("pass") is None and Board(9, 9, 82).action(" PASS ") == 81
