"""A run on Sebulba: its counters, and what can be asked of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from podracer.evaluate import Evaluation, evaluator, shared
from podracer.scoring import ScoredRun


@dataclasses.dataclass
class Run(ScoredRun):
    """A run on Sebulba, going on or finished."""

    updates: int = 0  # learner steps
    restarts: int = 0  # how often it was resumed

    @property
    def params(self) -> Any:
        """The current params, on this host's first learner core."""
        return jax.tree.map(lambda leaf: leaf.addressable_data(0), self.loop.learner.state.params)

    def evaluate(self, episodes: int = 20, greedy: bool = True, seed: int = 0, params: Any = None) -> Evaluation:
        """Measure the current (or other) params, on all hosts; see `podracer.evaluate`."""
        measure = shared(evaluator, self.agent, self.env, episodes, greedy=greedy)
        return measure(self.params if params is None else params, seed)
