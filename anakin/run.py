"""A run on Anakin: its state, and what can be asked of it."""

from __future__ import annotations

import dataclasses
from typing import Any

from anakin.state import AnakinState
from podracer.evaluate import Evaluation, Evaluator, shared
from podracer.scoring import ScoredRun


@dataclasses.dataclass
class Run(ScoredRun):
    """A run on Anakin, going on or finished."""

    state: AnakinState = None  # type: ignore[assignment]  # set by `train` and `resume`

    @property
    def params(self) -> Any:
        """The current params; [M, ...] with many runs."""
        return self.state.learner.params

    def evaluate(self, episodes: int = 128, greedy: bool = True, seed: int = 0, params: Any = None) -> Evaluation:
        """Measure the current (or other) params, on all hosts; see `podracer.evaluate.Evaluator`."""
        many = self.loop.members is not None
        measure = shared(Evaluator, self.agent, self.env, episodes, greedy=greedy, many=many)
        return measure(self.params if params is None else params, seed)
