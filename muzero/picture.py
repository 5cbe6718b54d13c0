"""A search tree as a picture: what was looked at, how often, and what it was thought to be worth."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from muzero.search import Tree
from podracer import plot
from podracer.errors import UserError


class Shown(NamedTuple):
    """A node and the edge above it."""

    index: int  # within its tree
    parent: int  # index into the list, -1 at the root
    edge: int  # action or outcome that leads here, -1 at the root
    depth: int
    visits: int
    value: float  # mean of the returns, from the view of who moves here
    qvalue: float  # of the edge, from the view of who moves above; 0 at the root
    prior: float  # of the edge; 1 at the root
    chance: bool  # the world moves here


def nodes(tree: Tree, number: int = 0) -> list[Shown]:
    """The nodes of one tree of the batch, parents before children, siblings by their action.

    Raises:
      UserError: the tree is mctx's.
    """
    if not isinstance(tree, Tree):
        raise UserError(f"got a tree of {type(tree).__module__}; expected one of muzero.search. Set search to fast.")
    names = (
        "children_index",
        "children_qvalues",
        "children_prior_logits",
        "node_values",
        "node_visits",
        "chance_nodes",
    )
    children, qvalues, logits, values, visits, chance = (
        np.asarray(jax.device_get(getattr(tree, name)[number])) for name in names
    )
    found = [Shown(0, -1, -1, 0, int(visits[0]), float(values[0]), 0.0, 1.0, bool(chance[0]))]
    for place, node in enumerate(found):  # grows while it is read
        for edge in np.flatnonzero(children[node.index] >= 0):
            child, prior = children[node.index, edge], np.exp(logits[node.index, edge])
            numbers = int(visits[child]), float(values[child]), float(qvalues[node.index, edge]), float(prior)
            found.append(Shown(int(child), place, int(edge), node.depth + 1, *numbers, bool(chance[child])))
    return found


def places(shown: list[Shown]) -> np.ndarray:
    """[n, 2] where each node stands: leaves side by side, parents over the middle of their children."""
    below: list[list[int]] = [[] for _ in shown]
    for place, node in enumerate(shown[1:], 1):
        below[node.parent].append(place)
    where, leaves = np.zeros((len(shown), 2)), 0
    where[:, 1] = [-node.depth for node in shown]
    stack = [(0, False)]
    while stack:
        place, done = stack.pop()
        if not below[place]:
            where[place, 0], leaves = leaves, leaves + 1
        elif done:
            where[place, 0] = where[below[place], 0].mean()
        else:
            stack += [(place, True), *((child, False) for child in reversed(below[place]))]
    return where


def draw(tree: Tree, number: int = 0, chosen: int | None = None, title: str | None = None) -> Any:
    """A matplotlib figure of one tree of the batch.

    Nodes are coloured by their value and as large as their visits; squares are chance nodes. Edges bear the action and,
    below the root, its Q-value; they are as thick as they were taken often. `chosen` is the action at the root that was
    taken.
    """
    shown = nodes(tree, number)
    where = places(shown)
    width, depth = where[:, 0].max() + 1, max(node.depth for node in shown)
    total = max(shown[0].visits, 1)
    title = title or f"{total - 1} simulations; at the nodes their visits, at the edges action and Q-value"
    figure, axes = plot.empty(title, (min(max(6.0, 0.55 * width), 40.0), 2.5 + 1.5 * depth))
    axes.grid(False)
    for place, node in enumerate(shown[1:], 1):
        ends = where[[node.parent, place]]
        taken = node.depth == 1 and node.edge == chosen
        axes.plot(*ends.T, color="C1" if taken else "0.6", lw=0.5 + 6 * node.visits / total, zorder=1)
        label = f"{node.edge}\n{node.qvalue:.2f}" if node.depth == 1 else f"{node.edge}"
        across, down = ends.mean(0)
        axes.text(across, down, label, fontsize=8, ha="center", va="center", zorder=3, bbox=_PAPER)
    values = np.array([node.value for node in shown])
    sizes = np.array([40 + 400 * np.sqrt(node.visits / total) for node in shown])
    limits = values.min(), values.max() + 1e-9
    for chance, marker in ((False, "o"), (True, "s")):
        kind = np.array([node.chance == chance for node in shown])
        if kind.any():
            dots = axes.scatter(
                *where[kind].T, s=sizes[kind], c=values[kind], marker=marker, vmin=limits[0], vmax=limits[1], zorder=2
            )
    for node, spot in zip(shown, where, strict=True):
        axes.annotate(
            f"{node.visits}", spot, (0, -9), textcoords="offset points", fontsize=7, ha="center", va="top", zorder=3
        )
    figure.colorbar(dots, ax=axes, label="value", shrink=0.6)
    axes.set_yticks(range(-depth, 1), [str(level) for level in range(depth, -1, -1)])
    axes.set_xticks([])
    axes.set_ylabel("moves ahead")
    axes.margins(0.08, 0.12)
    return figure


_PAPER = {"boxstyle": "round,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.75}
