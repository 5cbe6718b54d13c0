"""`podracer eval RUN --against OPPONENT`: games of a trained agent against others, and a table of their strength."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np

from muzero import arena, players
from podracer.errors import UserError, check_number
from podracer.saving import open_checkpoints


def searching(agent: Any, simulations: int | None) -> Any:
    """`agent` with another number of simulations; None leaves it.

    Raises:
      UserError: it does not search.
    """
    if simulations is None:
        return agent
    check_number("--simulations", simulations, minimum=1)
    if not hasattr(agent.config, "num_simulations"):
        raise UserError(f"--simulations is {simulations}, but {agent.name} does not search. Leave it out.")
    return agent.rebuild(dataclasses.replace(agent.config, num_simulations=simulations))


def against(directory: pathlib.Path, options: Any, load: Any) -> None:
    """Play and print. `load(directory) -> (agent, env, params, steps)`."""
    agent, env, params, steps = load(directory)
    game = arena.board_game(env)
    agent = searching(agent, options.simulations)
    one = players.trained(f"{agent.name} (step {steps:,})", agent, params)
    if options.against == "earlier":
        _earlier(directory, options, game, agent, params)
        return
    opening = 0
    if (pathlib.Path(options.against) / "config.json").is_file():
        agent, env, params, steps = load(pathlib.Path(options.against))
        if arena.board_game(env).spec.name != game.spec.name:
            raise UserError(f"{options.against} was trained on {env.spec.name}; expected {game.spec.name}.")
        agent = searching(agent, options.simulations)
        other = players.trained(f"{options.against}, {agent.name} (step {steps:,})", agent, params)
        opening = 2  # neither of them makes any noise
    else:
        other = players.opponent(options.against, game.spec)
    result = arena.match(game, one, other, options.games, options.seed, opening)
    if options.json:
        outcomes = {"moves_first": result.first.tolist(), "moves_second": result.second.tolist()}
        print(json.dumps({"run": str(directory), "against": options.against, "score": result.score, **outcomes}))
        return
    openings = ", each after 2 random moves" if opening else ""
    print(f"{one.name} on {game.spec.name} against {other.name}, {options.games} games{openings}")
    print(arena.table(result))


def _earlier(directory: pathlib.Path, options: Any, game: Any, agent: Any, params: Any) -> None:
    """All checkpoints of a run, and a random player, against one another."""
    found = open_checkpoints(directory)
    entrants = [players.trained(f"step {steps:,}", agent, found.params(params, steps)) for steps in found.steps()]
    found.close()
    if not entrants:
        raise UserError(f"{directory} has no checkpoints; expected some. Train with --keep 10 to have earlier ones.")
    entrants.append(players.random_player())
    points, ratings = arena.tournament(game, entrants, options.games, options.seed)
    shares = points.sum(1) / (options.games * (len(entrants) - 1))
    if options.json:
        rows = {each.name: {"elo": float(rating)} for each, rating in zip(entrants, ratings)}
        print(json.dumps({"run": str(directory), "elo": rows, "points": points.tolist()}))
        return
    print(f"{agent.name} on {game.spec.name}: {options.games} games of each two, each after 2 random moves")
    print(f"{'':<18}{'elo':>6}{'score':>8}")
    for place in np.argsort(-ratings):
        print(f"{entrants[place].name:<18}{ratings[place]:>6.0f}{shares[place]:>8.3f}")
