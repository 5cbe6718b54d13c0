"""`podracer play GAME RUN`: a board game in the terminal against a trained agent."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from launch.machine import Platform
from launch.parse import parse
from podracer import config
from podracer.errors import UserError, check_number, unknown

GAMES = ("pgx/connect_four", "pgx/go_19x19", "pgx/go_9x9", "pgx/othello", "pgx/tic_tac_toe")
LETTERS = "abcdefghjklmnopqrst"  # without i, as go players have it


@dataclasses.dataclass(frozen=True)
class PlayOptions:
    """Options of `play`."""

    first: Literal["human", "agent"] = "human"
    """Who moves first."""
    simulations: int | None = None
    """Simulations of the agent's search per move; None: as it was trained."""
    seed: int = 0
    """Seed of the game."""
    params: Literal["best", "last"] = "last"
    """The params that evaluated best during the run, or the last ones."""
    platform: Platform | None = None
    """cpu, gpu or tpu; None takes what is there."""


@dataclasses.dataclass(frozen=True)
class Board:
    """How moves of a game are written, and its board drawn."""

    height: int
    width: int
    num_actions: int

    @property
    def drops(self) -> bool:
        """Whether a move is a column alone."""
        return self.num_actions == self.width

    def action(self, text: str) -> int | None:
        """The action that was typed, or None where it is none."""
        text = text.strip().lower()
        if self.drops:
            return int(text) - 1 if text.isdecimal() and 1 <= int(text) <= self.width else None
        if text == "pass" and self.num_actions > self.height * self.width:
            return self.height * self.width
        column, row = LETTERS.find(text[:1]) if text else -1, text[1:]
        if not 0 <= column < self.width or not row.isdecimal() or not 1 <= int(row) <= self.height:
            return None
        return (int(row) - 1) * self.width + column

    def name(self, action: int) -> str:
        """An action as it is typed."""
        if self.drops:
            return str(action + 1)
        if action == self.height * self.width:
            return "pass"
        return f"{LETTERS[action % self.width]}{action // self.width + 1}"

    def example(self) -> str:
        """What a move looks like."""
        if self.drops:
            return f"a column, 1 to {self.width}"
        last = " or pass" if self.num_actions > self.height * self.width else ""
        return f"a place such as b2{last}"

    def draw(self, planes: Any, mine: str, theirs: str) -> str:
        """The board; the first two planes are the stones of who is to move and of the other."""
        cells = np.where(planes[..., 0], mine, np.where(planes[..., 1], theirs, "."))
        if self.drops:
            head = "  " + " ".join(str(column + 1) for column in range(self.width))
            return "\n".join([head, *("  " + " ".join(row) for row in cells)])
        head = "   " + " ".join(LETTERS[: self.width])
        return "\n".join([head, *(f"{number + 1:>2} " + " ".join(row) for number, row in enumerate(cells))])


def play(arguments: list[str]) -> None:
    """`podracer play GAME RUN [OPTIONS]`."""
    text = "Play a board game against a trained agent. You are X."
    if {"-h", "--help"} & set(arguments):
        parse(PlayOptions, ["--help"], "podracer play GAME RUN", text)
    if len(arguments) < 2 or arguments[0].startswith("-") or arguments[1].startswith("-"):
        raise UserError("play needs a game and a run directory; expected podracer play pgx/connect_four RUN [OPTIONS].")
    name, directory = arguments[0], pathlib.Path(arguments[1])
    if name not in GAMES:
        raise unknown("board game", name, GAMES, f"There are {', '.join(GAMES)}.")
    options = parse(PlayOptions, arguments[2:], "podracer play GAME RUN", text)
    check_number("--seed", options.seed, minimum=0, maximum=2**32 - 1)
    trained_on = config.read_recipe(directory).env
    if trained_on != name:
        raise UserError(f"{directory} was trained on {trained_on}; expected {name}. Name a run of {name}.")
    agent, env, params = _load(directory, options)
    try:
        _game(env, agent, params, options, sys.stdin.readline)
    except (KeyboardInterrupt, EOFError):
        print("\ngame left")


def _load(directory: pathlib.Path, options: PlayOptions) -> tuple[Any, Any, Any]:
    from launch.matches import searching
    from launch.trained import load
    from muzero import arena

    agent, env, params, members, _ = load(directory, options.params, None, options.platform)
    if members is not None:
        raise UserError(f"{directory} holds {members} runs; expected one. Train without --seeds and --sweep.")
    return searching(agent, options.simulations), arena.board_game(env), params


def _game(env: Any, agent: Any, params: Any, options: PlayOptions, read: Callable[[], str]) -> None:
    """One game, until it is over or `read` has nothing more."""
    import jax

    from muzero.players import trained
    from podracer.envs.host import host_time_step

    player = trained(agent.name, agent, params)
    height, width = env.spec.observation["observation"].shape[:2]
    board = Board(height, width, env.spec.action.num_values)
    act, step, reset = (jax.jit(function) for function in (player.act, env.step, env.reset))
    state, seen = reset(jax.random.key(options.seed))
    memory, humans_turn, moves = player.initial(1), options.first == "human", 0
    ones, zeros = np.ones(1, np.float32), np.zeros(1, np.float32)
    while True:
        mine, theirs = ("X", "O") if humans_turn else ("O", "X")
        key = jax.random.fold_in(jax.random.key(options.seed), moves)
        if humans_turn:
            print(board.draw(np.asarray(seen["observation"]), mine, theirs))
            action = _asked(board, np.asarray(seen["action_mask"]), read)
        else:
            first = np.full(1, moves < 2)
            now = host_time_step(jax.tree.map(lambda leaf: leaf[None], seen), zeros, ones, first, ~first)
            chosen, memory = act(params, memory, now, key)
            action = int(chosen[0])
            print(f"{agent.name} plays {board.name(action)}")
        state, out = step(state, np.int32(action), key)
        seen, humans_turn, moves = out.observation, not humans_turn, moves + 1
        if bool(out.terminated) or bool(out.truncated):
            print(board.draw(np.asarray(seen["observation"]), theirs, mine))
            won = float(out.reward) * (-1 if humans_turn else 1)  # whose turn it would be did not move last
            print("a draw" if won == 0 else "you win" if won > 0 else f"{agent.name} wins")
            return


def _asked(board: Board, legal: np.ndarray, read: Callable[[], str]) -> int:
    """A legal move of the human's.

    Raises:
      EOFError: there is no more input.
    """
    while True:
        print("your move: ", end="", flush=True)
        line = read()
        if not line:
            raise EOFError
        if not sys.stdin.isatty():
            print(line.strip())  # what a terminal would show
        action = board.action(line)
        if action is None:
            print(f"'{line.strip()}' is no move; expected {board.example()}. Try again.")
        elif not legal[action]:
            print(f"{board.name(action)} is not possible here; expected an empty place or an open column. Try again.")
        else:
            return action
