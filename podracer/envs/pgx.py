"""Board and card games of pgx: https://github.com/sotetsuk/pgx."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from podracer.envs import adapting, api
from podracer.errors import UserError, check_number, unknown

_LISTED = (
    "2048 animal_shogi backgammon chess connect_four gardner_chess go_9x9 go_19x19 hex kuhn_poker leduc_holdem "
    "minatar-asterix minatar-breakout minatar-freeway minatar-seaquest minatar-space_invaders othello shogi "
    "sparrow_mahjong tic_tac_toe"
)
NAMES = tuple(_LISTED.split())

# For two players with all in view, who move one after the other (a pass is a move).
_TAKE_TURNS = (
    *("animal_shogi", "chess", "connect_four", "gardner_chess", "go_9x9", "go_19x19", "hex"),
    *("othello", "shogi", "tic_tac_toe"),
)

# `(observation, legal_action_mask [num_values] bool, key) -> action`, for one game
Opponent = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class State(NamedTuple):
    game: Any  # pgx's own state
    seat: jax.Array  # [] int32, the player that the agent is; not used in self-play


def random_opponent(observation: jax.Array, legal_action_mask: jax.Array, key: jax.Array) -> jax.Array:
    """Any legal action, all equally likely."""
    return jax.random.categorical(key, jnp.where(legal_action_mask, 0.0, -jnp.inf)).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Pgx:
    """`pgx.make(id)`. Observation: {"observation": [...], "action_mask": bool [num_values]}.

    Games for one player ignore `opponent`. In games for more there are two ways to play; "auto" is "random", except
    that agents that plan with the game itself (alphazero) play board games against themselves.

    `opponent="random"` or a function of your own: the agent takes one seat, drawn anew for each episode, and the
    opponent moves inside `step` (and inside `reset` where it begins) until it is the agent's turn or the game is
    over. Rewards are the agent's: +1 for a win, -1 for a loss, whoever made the last move. To the agent this is an
    ordinary environment with one player.

    `opponent="self"`: self-play. Each step is one move of the player whose turn it is; the observation is from the
    view of the player to move; the reward belongs to the player who has JUST moved. In a two-player zero-sum game a
    state that is worth v to the player to move is worth -v to the one who moved before, so returns are
    r + (-gamma) v: an agent must negate its discount. MuZero does where the spec says `alternating`, which it does for
    the board games; in the others (backgammon, poker, mahjong) a player may move twice in a row, and the observation
    does not say whose turn it is. Agents that do not negate it will maximise the wrong thing. Evaluations of self-play
    are games against an opponent that moves at random, as one of two equal players always wins.

    An illegal action ends the game with pgx's penalty. The mask of a finished game is all True. The observation of a
    finished game is from the view of the player who would be next; nothing is bootstrapped from it. pgx never
    truncates: a `minatar-*` game that may go on for ever wants a `TimeLimit`.

    Args:
      id: such as "connect_four".
      opponent: "auto", "random", "self", or `(observation, legal_action_mask, key) -> action` for one game.
      opening_moves: self-play of board games starts after 0 to so many moves at random. Two equal players who learn
        from each other come to play few openings, and are lost against whoever plays another.

    Raises:
      UserError: `opponent` is none of these; `opening_moves` is negative, or not 0 where nothing can be opened; pgx is
        not installed or knows no such game.
    """

    id: str
    opponent: Literal["auto", "random", "self"] | Opponent = "auto"
    opening_moves: int = 0

    def __post_init__(self):
        check_number("opening_moves", self.opening_moves, minimum=0, whole=True)
        if self.opponent not in ("auto", "random", "self") and not callable(self.opponent):
            raise UserError(
                f"opponent is {self.opponent!r}; expected 'random', 'self' or a function "
                "(observation, legal_action_mask, key) -> action."
            )
        if self.opening_moves and (self.id not in _TAKE_TURNS or self.opponent not in ("auto", "self")):
            what = f"{self.id} against {self.opponent}"
            raise UserError(f"opening_moves is {self.opening_moves}, but {what} is no self-play by turns; expected 0.")
        _ = self.spec  # now: pgx makes constants when it is imported, which must not happen inside a traced function

    @functools.cached_property
    def made(self) -> Any:
        """pgx's own environment."""
        try:
            import pgx
        except ImportError as error:
            raise adapting.missing("pgx", error) from error
        available = pgx.available_envs()
        if self.id not in available:
            raise unknown("pgx game", self.id, available, "See `podracer envs`.")
        return pgx.make(self.id)

    @functools.cached_property
    def spec(self) -> api.Spec:
        _ = self.made
        _, observation = jax.eval_shape(self.reset, jax.random.key(0))
        num_actions = observation["action_mask"].shape[0]
        alternating = self.opponent == "self" and self.id in _TAKE_TURNS
        spec = adapting.array_spec(observation)
        return api.Spec(f"pgx/{self.id}", spec, api.Discrete(num_actions), alternating=alternating)

    @property
    def self_play(self) -> Pgx:
        """The game as agents that plan with it play it, where nothing was said."""
        plays = self.opponent == "auto" and self.id in _TAKE_TURNS
        return dataclasses.replace(self, opponent="self") if plays else self

    @property
    def evaluation(self) -> Pgx:
        """What agents are measured in."""
        return dataclasses.replace(self, opponent="random", opening_moves=0) if self.opponent == "self" else self

    @property
    def _has_opponent(self) -> bool:
        return self.opponent != "self" and self.made.num_players > 1

    def reset(self, key):
        game = self.made.init(key)
        seat = jnp.zeros((), jnp.int32)
        if self._has_opponent:
            seat_key, move_key = jax.random.split(jax.random.fold_in(key, 1))
            seat = jax.random.randint(seat_key, (), 0, self.made.num_players)
            game, _ = self._await_turn(game, seat, jnp.zeros((), jnp.float32), move_key)
        elif self.opponent == "self" and self.opening_moves:
            game = self._open(game, jax.random.fold_in(key, 1))
        return State(game, seat), _observe(game)

    def step(self, state, action, key):
        player = state.seat if self._has_opponent else state.game.current_player
        game = self.made.step(state.game, action, key)
        reward = game.rewards[player].astype(jnp.float32)
        if self._has_opponent:
            game, reward = self._await_turn(game, state.seat, reward, jax.random.fold_in(key, 1))
        return State(game, state.seat), api.Step(_observe(game), reward, game.terminated, game.truncated)

    def _open(self, game, key):
        """Random moves, as many as are drawn for this game; one that would end it is left out, and those after it."""
        count_key, move_key = jax.random.split(key)
        count = jax.random.randint(count_key, (), 0, self.opening_moves + 1)

        def move(number, carry):
            game, goes_on = carry
            choice_key, step_key = jax.random.split(jax.random.fold_in(move_key, number))
            choice = random_opponent(game.observation, game.legal_action_mask, choice_key)
            moved = self.made.step(game, choice, step_key)
            goes_on &= (number < count) & ~moved.terminated & ~moved.truncated
            return jax.tree.map(lambda new, old: jnp.where(goes_on, new, old), moved, game), goes_on

        return jax.lax.fori_loop(0, self.opening_moves, move, (game, jnp.bool_(True)))[0]

    def _await_turn(self, game, seat, reward, key):
        """Let the others move until it is `seat`'s turn or the game is over; `(game, reward plus what they caused)`.

        A loop, because in some games (backgammon) a player may move several times in a row.
        """
        policy: Any = random_opponent if self.opponent in ("auto", "random") else self.opponent

        def others_turn(carry):
            game = carry[0]
            return (game.current_player != seat) & ~game.terminated & ~game.truncated

        def move(carry):
            game, reward, key = carry
            key, policy_key, step_key = jax.random.split(key, 3)
            action = policy(game.observation, game.legal_action_mask, policy_key)
            game = self.made.step(game, action, step_key)
            return game, reward + game.rewards[seat].astype(jnp.float32), key

        game, reward, _ = jax.lax.while_loop(others_turn, move, (game, reward, key))
        return game, reward

    def render(self, state):
        """uint8 [height, width, 3]: the planes that the player to move sees."""
        planes = state.game.observation
        if planes.ndim not in (2, 3):
            raise UserError(f"pgx/{self.id} cannot be drawn: its observation is not a grid of planes.")
        return adapting.draw_planes(planes)


def _observe(game: Any) -> dict[str, jax.Array]:
    return {"observation": adapting.compact(game.observation), "action_mask": game.legal_action_mask}
