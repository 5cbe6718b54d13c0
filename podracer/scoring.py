"""A run in progress, and how it is scored: evaluations on the way, the best params so far, their absolute score."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from podracer import saving, shelf
from podracer.errors import UserError
from podracer.evaluate import Evaluation
from podracer.sinks import Sink
from podracer.types import Agent


@dataclasses.dataclass
class ScoredRun:
    """A run, going on or finished, with its best params. M runs trained in one program have a leading axis [M]."""

    agent: Agent
    env: Any
    loop: Any
    settings: Any
    directory: pathlib.Path | None
    steps: int = 0
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)  # the last row
    best_params: Any = None  # on the host, by the evaluations; [M, ...]
    best_score: Any = None  # mean return of best_params when they were chosen; [M]
    best_steps: Any = None  # when that was; [M]
    absolute_score: Any = None  # mean return of best_params, measured once more at the end; [M]
    train_s: float = 0.0  # seconds of training, without compiling, evaluating and saving

    @property
    def env_name(self) -> str:
        return self.env.spec.name

    def evaluation_seed(self, offset: int) -> int:
        """A seed for the run's evaluations; it wraps around at 2**32."""
        return (self.settings.seed + offset) % 2**32

    def write(self, row: dict[str, Any], sinks: Sequence[Sink]) -> None:
        """Hand a row to the sinks; `metrics` keeps its numbers."""
        self.metrics = self.metrics | row
        for sink in sinks:
            sink.write(row)


def consider(run: ScoredRun, params: Any, steps: int, result: Evaluation, sinks: Sequence[Sink]) -> None:
    """Take an evaluation of `params` at `steps`: write it, and keep the params where they are the best so far."""
    scores = result.returns.mean(-1)
    if run.best_score is None:
        better = np.ones(scores.shape, bool)
    else:
        # The later of equals: it has seen more.
        better = (scores >= run.best_score) | (np.isnan(run.best_score) & ~np.isnan(scores))
    if np.any(better):
        now = jax.device_get(params)
        if run.best_params is None or not better.shape:
            run.best_params, run.best_score = now, scores
            run.best_steps = np.full(scores.shape, steps)
        else:

            def choose(new, old):
                return np.where(better.reshape(better.shape + (1,) * (new.ndim - 1)), new, old)

            run.best_params = jax.tree.map(choose, now, run.best_params)
            run.best_score = np.where(better, scores, run.best_score)
            run.best_steps = np.where(better, steps, run.best_steps)
        meta = {"score": run.best_score.tolist(), "chosen_at": run.best_steps.tolist()}
        saving.save_best(run, steps, run.best_params, meta)
    _write_evaluation(run, steps, sinks, "eval", result)


def absolute(run: ScoredRun, result: Evaluation, sinks: Sequence[Sink]) -> None:
    """Take the evaluation of the best params on many new episodes: choosing them was biased upwards."""
    run.absolute_score = result.returns.mean(-1)
    _write_evaluation(run, run.steps, sinks, "absolute", result)


def restore_best(run: ScoredRun, like: Any) -> None:
    """Read the best params of the run's directory, where there are any; damaged ones are a warning."""
    best = saving.open_best(run)
    if not best.names():
        return
    try:
        params = best.params(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), like))
        meta = best.meta()
    except UserError as error:
        shelf.warn(f"{error} The next evaluation chooses anew.")
        return
    run.best_params = jax.device_get(params)
    run.best_score, run.best_steps = (np.asarray(meta[name]) for name in ("score", "chosen_at"))


def _write_evaluation(run: ScoredRun, steps: int, sinks: Sequence[Sink], prefix: str, result: Evaluation) -> None:
    summary = result.summary()
    for member in range(result.returns.shape[0]) if result.returns.ndim > 1 else [None]:
        chosen = {k: v if member is None or not isinstance(v, list) else v[member] for k, v in summary.items()}
        row = {"steps": steps} | ({} if member is None else {"member": member})
        run.write(row | {f"{prefix}_{name}": value for name, value in chosen.items()}, sinks)


class Clock:
    """Training time: between two laps, without what happens in `paused`; added to `run.train_s`."""

    def __init__(self, run: ScoredRun, now: Callable[[], float] = time.perf_counter):
        self._run, self._now, self._last = run, now, now()

    def lap(self, at: float | None = None) -> float:
        """Seconds since the lap before, up to now or `at`."""
        at = self._now() if at is None else at
        lap, self._last = at - self._last, at
        self._run.train_s += lap
        return lap

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        before = self._now()
        yield
        self._last += self._now() - before
