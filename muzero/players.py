"""Players of two-player games: a trained agent, and opponents whose strength is known.

A player sees observations with the state of the game (`envs.WithState`), from the view of whoever is to move.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from muzero import planning
from muzero.alphazero import Node, stepper
from muzero.qvalues import qtransform_by_min_max
from podracer.errors import UserError, check_number
from podracer.networks.policies import mask_logits
from podracer.specs import STATE, Spec
from podracer.types import Agent, Array, TimeStep


class Player(NamedTuple):
    """Who moves in B games at once."""

    name: str
    act: Callable[..., Any]  # (params, carried state, TimeStep [B], key) -> (action [B], carried state)
    initial: Callable[[int], Any] = lambda batch_size: ()  # (batch size) -> carried state
    params: Any = ()


def trained(name: str, agent: Agent, params: Any) -> Player:
    """An agent at its best."""
    step = agent.greedy_step or agent.actor_step

    def act(params, state, timestep, key):
        output, state = step(params, state, timestep, key)
        return output.action, state

    return Player(name, act, agent.initial_actor_state, params)


def random_player() -> Player:
    """Any legal move, all equally likely."""

    def act(params, state, timestep: TimeStep, key):
        return jax.random.categorical(key, _uniform(timestep.observation)).astype(jnp.int32), state

    return Player("random", act)


def mcts(spec: Spec, simulations: int, exploration: float = 1.25) -> Player:
    """Monte Carlo tree search without any network: each new node is judged by one game of random moves from there."""
    check_number("simulations", simulations, minimum=1, whole=True)
    search = planning.implementation("fast")
    discount = -1.0 if spec.alternating else 1.0
    recurrent = stepper(spec, discount, lambda params, key, seen: (_uniform(seen), rollout(spec, seen, key)))

    def act(params, state, timestep: TimeStep, key):
        seen = timestep.observation
        size = timestep.first.shape[0]
        root = planning.record("RootFnOutput")(
            prior_logits=_uniform(seen),
            value=jnp.zeros(size),
            embedding=Node(seen[STATE], jnp.zeros(size, bool)),
        )
        found = search.muzero_policy(
            (),
            key,
            root,
            recurrent,
            simulations,
            invalid_actions=~seen["action_mask"],
            qtransform=functools.partial(qtransform_by_min_max, min_value=-1.0, max_value=1.0),
            dirichlet_fraction=0.0,
            temperature=0.0,
            pb_c_init=exploration,
        )
        return found.action, state

    return Player(f"mcts:{simulations}", act)


def rollout(spec: Spec, observation: Any, key: Array) -> Array:
    """[L] what one game of random moves brings to who is to move in `observation` [L, ...]."""
    sign = -1.0 if spec.alternating else 1.0

    def step(seen, key):
        move_key, step_key = jax.random.split(key)
        action = jax.random.categorical(move_key, _uniform(seen)).astype(jnp.int32)
        out = spec.model.step(spec.model.state_of(seen), action, step_key)[1]
        return _kept(out.observation), out.reward.astype(jnp.float32), out.terminated

    def move(carry):
        seen, live, factor, total, key = carry
        key, step_key = jax.random.split(key)
        seen, reward, over = jax.vmap(step)(seen, jax.random.split(step_key, live.shape[0]))
        return seen, live & ~over, factor * sign, total + jnp.where(live, factor * reward, 0.0), key

    seen = _kept(observation)
    size = seen["action_mask"].shape[0]
    start = seen, jnp.ones(size, bool), jnp.float32(1.0), jnp.zeros(size), key
    return jax.lax.while_loop(lambda carry: jnp.any(carry[1]), move, start)[3]


def minimax() -> Player:
    """Perfect tic-tac-toe: any of the moves that keep the value of the position, all equally likely."""

    def act(params, state, timestep: TimeStep, key):
        planes = timestep.observation["observation"].astype(jnp.int32).reshape(-1, 9, 2)
        position = jnp.sum((planes[..., 0] + 2 * planes[..., 1]) * 3 ** jnp.arange(9), -1)
        best = jnp.asarray(tic_tac_toe()[1])[position]
        return jax.random.categorical(key, jnp.where(best, 0.0, -jnp.inf)).astype(jnp.int32), state

    return Player("minimax", act)


_LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


@functools.cache
def tic_tac_toe() -> tuple[np.ndarray, np.ndarray]:
    """`(value [3^9] int8 for who is to move, best moves [3^9, 9] bool)` of every position that can come up.

    A position's number has one digit per cell, the first cell's the lowest: 0 empty, 1 mine, 2 theirs.
    """
    value, best = np.zeros(3**9, np.int8), np.zeros((3**9, 9), bool)
    known: set[int] = set()

    def solve(cells: tuple[int, ...]) -> int:
        number = sum(cell * 3**place for place, cell in enumerate(cells))
        if number in known:
            return int(value[number])
        known.add(number)
        if any(all(cells[place] == 2 for place in line) for line in _LINES):
            value[number] = -1
        elif 0 in cells:
            # After a move the other one sees the cells with 1 and 2 exchanged.
            after = lambda move: tuple((0, 2, 1)[1 if place == move else cell] for place, cell in enumerate(cells))
            moves = {place: -solve(after(place)) for place in range(9) if cells[place] == 0}
            value[number] = max(moves.values())
            best[number, [place for place, worth in moves.items() if worth == value[number]]] = True
        return int(value[number])

    solve((0,) * 9)
    return value, best


def opponent(name: str, spec: Spec) -> Player:
    """The opponent of that name: random, mcts:SIMULATIONS (mcts alone: 400) or, for tic-tac-toe, minimax.

    Raises:
      UserError: there is none of that name for this game.
    """
    kind, _, number = name.partition(":")
    if name == "random":
        return random_player()
    if kind == "mcts" and (not number or number.isdigit()):
        return mcts(spec, int(number or 400))
    if name == "minimax" and spec.name == "pgx/tic_tac_toe":
        return minimax()
    raise UserError(
        f"the opponent is '{name}'; expected random, mcts:SIMULATIONS, minimax (for pgx/tic_tac_toe), earlier, or the "
        "directory of a run. Change --against."
    )


def _uniform(observation: Any) -> Array:
    mask = observation["action_mask"]
    return mask_logits(jnp.zeros(mask.shape), mask)


def _kept(observation: Any) -> dict[str, Any]:
    """What random moves need of an observation."""
    return {name: observation[name] for name in ("action_mask", STATE)}
