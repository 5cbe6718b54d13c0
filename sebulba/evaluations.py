"""Evaluations in a thread of their own, beside the training."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from podracer.evaluate import Evaluation
from sebulba.threads import Supervisor


class Evaluated(NamedTuple):
    """Params and how they did."""

    steps: int  # when the params were current
    params: Any  # on the host
    result: Evaluation


class Evaluations:
    """Measures params one after the other, in the order they were asked for.

    Args:
      supervisor: whose thread it becomes.
      measure: `params -> Evaluation`; called in that thread.
    """

    def __init__(self, supervisor: Supervisor, measure: Callable[[Any], Evaluation]):
        self._supervisor, self._measure = supervisor, measure
        self._asked: collections.deque[tuple[int, Any]] = collections.deque()
        self._done: collections.deque[Evaluated] = collections.deque()
        self._open = 0
        self._changed = threading.Condition()

    @property
    def pending(self) -> bool:
        """Whether any params are still to be measured."""
        return self._open > 0

    def start(self) -> None:
        self._supervisor.start("evaluator", self._run)

    def ask(self, steps: int, params: Any) -> None:
        """Measure `params` (on the host) when it is their turn."""
        with self._changed:
            self._asked.append((steps, params))
            self._open += 1
            self._changed.notify_all()

    def finished(self) -> Iterator[Evaluated]:
        """What was measured since the last call."""
        while self._done:
            yield self._done.popleft()

    def wait(self) -> None:
        """Wait for all that was asked for.

        Raises:
          Stopped: the run is being stopped.
        """
        with self._changed:
            self._supervisor.wait(self._changed, lambda: not self.pending, "waiting for the evaluations")

    def _run(self) -> None:
        while True:
            with self._changed:
                self._supervisor.wait(self._changed, lambda: len(self._asked) > 0, "waiting for params to evaluate")
                steps, params = self._asked.popleft()
            # A compiled evaluation says nothing before it ends; one on the host does at each step.
            self._supervisor.beat("evaluating", patience_s=3600)
            result = self._measure(params)
            with self._changed:
                self._done.append(Evaluated(steps, params, result))
                self._open -= 1
                self._changed.notify_all()
