"""Matches between players of a game by turns, and what they say of the players' strength.

All games of a match run at once. Each player moves first in half of them. Of two players without any noise all games
would be the same one: `opening` random moves make them differ, the same ones for both sides.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from muzero.players import Player
from podracer import envs
from podracer.errors import UserError, check_number
from podracer.networks.policies import mask_logits
from podracer.types import Array, TimeStep

MAX_MOVES = 1_000  # of a game; then it is a draw


class Match(NamedTuple):
    """Games of one player against another, by who moved first: 1 won, 0 drawn, -1 lost, for the one player."""

    first: np.ndarray  # [N / 2] where the one moved first
    second: np.ndarray  # [N / 2] where the other did

    @property
    def score(self) -> float:
        """Wins and half of the draws, as a share of the games."""
        return float(np.mean((np.concatenate(self) + 1) / 2))


def board_game(env: Any) -> envs.WithState:
    """`env` as matches play it: in self-play, with its state.

    Raises:
      UserError: it is no game in which two take turns.
    """
    inner = env.env if isinstance(env, envs.WithState) else env
    if isinstance(inner, envs.Pgx):
        inner = envs.Pgx(inner.id, "self")
    if not inner.spec.alternating:
        raise UserError(
            f"{inner.spec.name} is no game in which two players take turns; expected one, such as pgx/connect_four."
        )
    return envs.WithState(inner)


def match(env: envs.WithState, one: Player, other: Player, games: int, seed: int = 0, opening: int = 0) -> Match:
    """Play `games` games, an even number.

    Raises:
      UserError: the number is odd.
    """
    check_number("games", games, minimum=2, whole=True)
    if games % 2:
        raise UserError(f"games is {games}; expected an even number, as each player moves first in half of them.")
    keys = jax.random.split(jax.random.key(seed), games // 2)

    def results(first, second):
        play = _compiled(env, _same(first), _same(second), opening)
        return np.asarray(play(first.params, second.params, keys)).astype(int)

    return Match(results(one, other), -results(other, one))


def _same(player: Player) -> Player:
    """The player without its params: what a program is compiled for."""
    return player._replace(params=(), name="")


@functools.lru_cache(64)
def _compiled(env: envs.WithState, first: Player, second: Player, opening: int) -> Any:
    return jax.jit(functools.partial(_play, env, (first, second), opening))


def _play(env: envs.WithState, players: tuple[Player, Player], opening: int, *args: Any) -> Array:
    """[B] int32, what came of a game from each of `keys` [B] for who moved first."""
    (*params, keys) = args
    size = keys.shape[0]
    state, seen = jax.vmap(env.reset)(keys)

    def advance(carry, action, key):
        """One move in all games; `mover` is 1 where the first player has moved, else -1."""
        state, _, live, result, mover = carry
        state, out = jax.vmap(env.step)(state, action, jax.random.split(key, size))
        result = jnp.where(live, result + mover * jnp.sign(out.reward), result)
        return state, out.observation, live & ~(out.terminated | out.truncated), result, -mover

    carry = state, seen, jnp.ones(size, bool), jnp.zeros(size), jnp.float32(1.0)
    for number in range(opening):
        drawn = jax.vmap(lambda key, mask: jax.random.categorical(key, mask_logits(jnp.zeros(mask.shape), mask)))
        move_keys = jax.vmap(lambda key, number=number: jax.random.fold_in(key, number))(keys)
        action = drawn(move_keys, carry[1]["action_mask"]).astype(jnp.int32)
        carry = advance(carry, action, keys[0])
    # After an odd number of opening moves it is the second player's turn.
    order = (0, 1) if opening % 2 == 0 else (1, 0)

    def both_move(loop):
        number, carry, memories, key = loop
        memories = list(memories)
        for who in order:
            key, move_key, step_key = jax.random.split(key, 3)
            now = TimeStep(
                carry[1], jnp.zeros(size), jnp.ones(size), jnp.full(size, number == 0), jnp.full(size, number > 0)
            )
            action, memories[who] = players[who].act(params[who], memories[who], now, move_key)
            carry = advance(carry, action, step_key)
        return number + 1, carry, tuple(memories), key

    def goes_on(loop):
        return jnp.any(loop[1][2]) & (loop[0] < MAX_MOVES // 2)

    memories = tuple(player.initial(size) for player in players)
    start = jnp.int32(0), carry, memories, jax.random.fold_in(keys[0], 1 << 20)
    return jnp.sign(jax.lax.while_loop(goes_on, both_move, start)[1][3]).astype(jnp.int32)


def interval(score: float, games: int) -> tuple[float, float]:
    """The 95 % interval of a score (Wilson 1927); draws make it a little too wide."""
    z = 1.96
    middle = (score + z**2 / (2 * games)) / (1 + z**2 / games)
    half = z * np.sqrt(score * (1 - score) / games + z**2 / (4 * games**2)) / (1 + z**2 / games)
    return float(middle - half), float(middle + half)


def table(result: Match) -> str:
    """Wins, draws and losses by side and in total."""
    rows = [f"{'':<14}{'wins':>6}{'draws':>7}{'losses':>8}{'score':>8}   95 % interval"]
    sides = {"moves first": result.first, "moves second": result.second, "total": np.concatenate(result)}
    for side, games in sides.items():
        score = float(np.mean((games + 1) / 2))
        low, high = interval(score, games.size)
        wins, draws, losses = (int(np.sum(games == outcome)) for outcome in (1, 0, -1))
        rows.append(f"{side:<14}{wins:>6}{draws:>7}{losses:>8}{score:>8.3f}   {low:.3f} to {high:.3f}")
    return "\n".join(rows)


def tournament(
    env: envs.WithState, players: list[Player], games: int, seed: int = 0, opening: int = 2
) -> tuple[np.ndarray, np.ndarray]:
    """Everybody against everybody: `(points [P, P] of each row's player against each column's, elo [P])`."""
    points = np.zeros((len(players), len(players)))
    for row in range(len(players)):
        for column in range(row):
            result = match(env, players[row], players[column], games, seed, opening)
            points[row, column] = result.score * games
            points[column, row] = games - points[row, column]
    return points, elo(points)


def elo(points: np.ndarray) -> np.ndarray:
    """Elo ratings of mean 0 for `points` [P, P] that each made against each other (Bradley and Terry 1952).

    The maximum of the likelihood by Hunter's minorisation (2004). A draw more between any two that have met keeps the
    ratings of those finite who won or lost every game.
    """
    met = (points + points.T) > 0
    won = points + 0.5 * met
    games = won + won.T
    strength = np.ones(len(points))
    for _ in range(10_000):
        new = won.sum(1) / np.maximum((games / (strength[:, None] + strength[None])).sum(1), 1e-12)
        new /= np.exp(np.mean(np.log(new)))
        if np.max(np.abs(np.log(new / strength))) < 1e-9:
            break
        strength = new
    return 400 * np.log10(strength / np.exp(np.mean(np.log(strength))))
