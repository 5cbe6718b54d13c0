"""Sequential Halving at the root, one simulation after the other or a whole round at once.

Danihelka et al. 2022, section 2: sample m actions without replacement by their Gumbel-perturbed logits, spend the
simulations on them in phases, and go on after each phase with the better half by `gumbel + logits + q`.

    m = 16, 50 simulations:   16 actions x 1 round, 8 x 1, 4 x 3, 2 x 7

**In order** (`exact`), as mctx does it: the n-th simulation goes to the best of the actions that have as many visits as
the schedule says. Scores are compared anew for each simulation, so which actions a phase goes on with can still change
while it lasts, with the Q-values it finds.

**In rounds** (`rounds`): the survivors are fixed when a phase starts, as in the paper's algorithm. Sub-trees under
different root actions share nothing, so each round is one simulation on all survivors, and one call of the model on a
batch k times as large: 16 simulations are 1 call, 32 are 4, 50 are 12. The result is exactly that of simulating the
survivors one by one. How often it takes the same action as the exact order is measured in `benchmarks/README.md` (all
at 16 simulations, about 96 % at 32). The schedule is the same for the whole batch: a tree with fewer legal actions than
a phase has survivors gets fewer simulations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from muzero.qvalues import ILLEGAL, first_of_highest
from muzero.recurrent import Expand
from muzero.simulate import Limits, Select, Start, simulate
from muzero.tree import Tree
from podracer.types import Array


class Phase(NamedTuple):
    """`rounds` simulations for each of `survivors` actions."""

    survivors: int
    rounds: int


def phases(num_considered: int, num_simulations: int) -> tuple[Phase, ...]:
    """The schedule for `num_considered` actions; a last round that the budget cuts short is a phase of its own."""
    if num_considered <= 1:
        return (Phase(1, num_simulations),)
    halvings = math.ceil(math.log2(num_considered))
    found: list[Phase] = []
    survivors, left = num_considered, num_simulations
    while left:
        planned = max(1, num_simulations // (halvings * survivors))
        rounds = min(planned, left // survivors)
        if rounds and found and found[-1].survivors == survivors:
            found[-1] = Phase(survivors, found[-1].rounds + rounds)
        elif rounds:
            found.append(Phase(survivors, rounds))
        left -= survivors * rounds
        if left and rounds < planned:  # the budget ends within this phase: the best of its survivors get what is left
            found.append(Phase(left, 1))
            break
        survivors = max(2, survivors // 2)
    return tuple(found)


def num_rounds(num_considered: int, num_simulations: int) -> int:
    """How often the model is called, one call after the other, by a search in rounds."""
    return sum(phase.rounds for phase in phases(num_considered, num_simulations))


def considered_visits(max_considered: int, num_simulations: int) -> np.ndarray:
    """[max_considered + 1, num_simulations] float32: the visit count of the actions that simulation n chooses from,

    by the number of actions that are considered.
    """
    table = np.zeros((max_considered + 1, num_simulations), np.float32)
    for considered in range(max_considered + 1):
        done = visits = 0
        for phase in phases(considered, num_simulations):
            for _ in range(phase.rounds):
                table[considered, done : done + phase.survivors] = visits
                done, visits = done + phase.survivors, visits + 1
    return table


Score = Callable[[Tree, Array], Array]  # (tree, candidates [B, A] bool) -> [B, A], ILLEGAL for what is no candidate


def in_order(score: Score, invalid: Array, max_considered: int, num_simulations: int) -> Callable[[Tree, Array], Array]:
    """`(tree, number of the simulation) -> [B]`: the best of the actions whose turn it is by their visits."""
    table = jnp.asarray(considered_visits(max_considered, num_simulations))
    considered = jnp.minimum(max_considered, jnp.sum(~invalid, axis=-1))

    def choose(tree: Tree, index: Array) -> Array:
        visits = table[considered, index][:, None]
        return first_of_highest(score(tree, tree.root.visits == visits), tree.root)

    return choose


def search_in_rounds(
    key: Array, tree: Tree, expand: Expand, select: Select, score: Score, schedule: tuple[Phase, ...], limits: Limits
) -> Tree:
    """All phases, each with its survivors side by side.

    Args:
      key: split for the calls of the model.
      tree: roots only.
      expand: the model; it is called with `survivors * B` lanes.
      select: the rule below the roots.
      score: see `Score`.
      schedule: from `phases`, with no more survivors than actions.
      limits: how many, how deep.
    """
    total = sum(phase.rounds for phase in schedule)
    keys = jax.random.split(key, total)
    done, first_row = 0, tree.batch_size
    candidates = jnp.ones(tree.root_invalid_actions.shape, bool)
    for phase in schedule:
        start, candidates = _survivors(score(tree, candidates), phase.survivors)
        lanes = phase.survivors * tree.batch_size
        # Nodes of the n-th round are at most n edges deep.
        depth = min(limits.depth, done + phase.rounds)

        def one_round(index, tree, start=start, lanes=lanes, depth=depth, done=done, first_row=first_row):
            model = partial(expand, keys[done + index])
            return simulate(tree, start, first_row + index * lanes, model, select, depth, limits.depth < total)

        tree = one_round(0, tree) if phase.rounds == 1 else jax.lax.fori_loop(0, phase.rounds, one_round, tree)
        done, first_row = done + phase.rounds, first_row + phase.rounds * lanes
    return tree


def _survivors(score: Array, number: int) -> tuple[Start, Array]:
    """The `number` best actions as lanes, slot by slot, and as a mask [B, A].

    Where fewer are left, the lanes of the others are not alive; the first always is, so that a tree without legal
    actions goes through the same motions as the others.
    """
    best, action = jax.lax.top_k(score, number)
    alive = (best > ILLEGAL / 2).at[:, 0].set(True)
    rows = jnp.arange(score.shape[0])[:, None]
    mask = jnp.zeros(score.shape, bool).at[rows, action].set(alive)
    return Start(action.T.reshape(-1).astype(jnp.int32), alive.T.reshape(-1)), mask
