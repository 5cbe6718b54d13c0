"""Sequential Halving with survivors fixed at the start of a phase, in plain Python: one tree, one simulation at a time.

Written from Danihelka et al. 2022 (algorithms 1 and 2, equations 8, 10, 14, appendix D), on a `models.Table`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np


class Place:
    """A node: its state, and what came of each action."""

    def __init__(self, model: Any, state: int):
        self.state, self.value = state, float(model.value[state])
        logits = np.asarray(model.logits[state], np.float64)
        self.prior = np.exp(logits - logits.max())
        self.prior /= self.prior.sum()
        self.returns = [self.value]
        self.children: dict[int, Place] = {}

    def q(self, model: Any, action: int) -> float:
        child = self.children[action]
        return model.reward[self.state, action] + model.discount[self.state, action] * np.mean(child.returns)

    def visits(self, action: int) -> int:
        return len(self.children[action].returns) if action in self.children else 0


def scaled_q(model: Any, place: Place, actions: range) -> np.ndarray:
    """Completed by the mixed value, stretched to [0, 1], times (50 + greatest visit count) / 10."""
    known = {action: place.q(model, action) for action in place.children}
    total = sum(place.visits(action) for action in actions)
    mixed = place.value
    if known:
        share = sum(place.prior[action] for action in known)
        average = sum(place.prior[action] * q for action, q in known.items()) / share
        mixed = (place.value + total * average) / (1 + total)
    completed = np.array([known.get(action, mixed) for action in actions])
    stretched = (completed - completed.min()) / max(completed.max() - completed.min(), 1e-8)
    return 0.1 * (50 + max(place.visits(action) for action in actions)) * stretched


def simulate(model: Any, root: Place, action: int, max_depth: int) -> None:
    actions = range(model.logits.shape[1])
    path = [(root, action)]
    while action in path[-1][0].children and len(path) < max_depth:
        place = path[-1][0].children[action]
        target = place.prior * np.exp(scaled_q(model, place, actions))
        target /= target.sum()
        visits = np.array([place.visits(each) for each in actions])
        action = int(np.argmax(target - visits / (1 + visits.sum())))
        path.append((place, action))
    parent, action = path[-1]
    if action in parent.children:  # at the limit of depth: seen once more
        child = parent.children[action]
        child.returns.append(child.value)
    else:
        child = parent.children[action] = Place(model, int(model.following[parent.state, action]))
    value = child.value
    for place, action in reversed(path):
        value = model.reward[place.state, action] + model.discount[place.state, action] * value
        place.returns.append(value)


def search(model: Any, state: int, gumbel: np.ndarray, legal: np.ndarray, considered: int, budget: int, max_depth: int):
    """The action, the improved policy, visits and value of the root."""
    root, actions = Place(model, state), range(model.logits.shape[1])
    root.prior = np.where(legal, root.prior, 0) / root.prior[legal].sum()
    with np.errstate(divide="ignore"):
        logits = np.log(root.prior)

    def order(candidates: list[int]) -> list[int]:
        score = gumbel + logits + scaled_q(model, root, actions)
        return sorted(candidates, key=lambda action: -score[action])

    halvings, wanted, left = math.ceil(math.log2(max(considered, 2))), considered, budget
    alive = [action for action in actions if legal[action]]
    while left > 0:
        alive = order(alive)[:wanted]
        for _ in range(max(1, budget // (halvings * wanted)) if considered > 1 else budget):
            if left < wanted:  # the budget ends within this round: a phase of its own
                alive = order(alive)
            for action in alive[: min(wanted, left)]:
                simulate(model, root, action, max_depth)
            left -= min(wanted, left)
        wanted = max(2, wanted // 2)
    visits = np.array([root.visits(action) for action in actions])
    best = order([action for action in actions if visits[action] == visits.max()])[0]
    policy = np.exp(logits + scaled_q(model, root, actions) - (logits + scaled_q(model, root, actions)).max())
    return best, policy / policy.sum(), visits, np.mean(root.returns)
