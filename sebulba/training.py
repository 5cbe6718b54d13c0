"""A run's threads from start to end, and what happens between two updates: rows, evaluations, checkpoints."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from podracer import hosts, mesh, profile, replays, scoring
from podracer.checkpoint import WRITE_TIMEOUT_S
from podracer.evaluate import Evaluation, evaluator, shared
from podracer.facts import memory_of
from podracer.interruption import Interruption
from podracer.metrics import ReturnWindow
from podracer.reporting import open_sinks
from podracer.runs import NonFiniteLoss
from podracer.saving import Saver
from podracer.scoring import Clock
from podracer.sinks import Sink
from sebulba import probe
from sebulba.evaluations import Evaluations
from sebulba.loop import Sebulba
from sebulba.report import Report, starvation
from sebulba.run import Run
from sebulba.update import Update

ROWS = 1000  # per run, about
SAY_EVERY_S = 60.0  # who waits for whom
# The absolute score is of so many times the episodes of one evaluation: whole Atari games take long.
ABSOLUTE_TIMES = 2


def go_on(
    run: Run,
    window: ReturnWindow,
    sinks: Sequence[Sink] | None,
    notes: Sequence[str] = (),
    evaluation_due: bool = False,
) -> Run:
    """The threads, from `run.steps` to the end."""
    loop, settings = run.loop, run.settings
    left = max(settings.total_steps - run.steps, 0)
    last = loop.learner.updates + math.ceil(left / loop.steps_per_update)
    end = run.steps + (last - loop.learner.updates) * loop.steps_per_update
    with (
        Saver(run) as saver,
        open_sinks(run, sinks, end) as (sinks, note),
        Interruption() as interruption,
        profile.tracing(settings.profile, run.directory) as trace,
    ):
        atari = getattr(loop.env, "atari", None) if loop.env.spec.frame_skip > 1 else None
        protocol = [f"{run.env_name}: {atari.describe()}"] if atari else []
        for text in (*notes, loop.describe(), *replays.describe(run.agent), *protocol):
            note(text)
        if loop.topology.shared and mesh.idle_cores(loop.topology.learner_mesh):
            note(mesh.IDLE)
        if settings.probe:
            ceiling = probe.steps_per_s(loop.env, loop.topology.num_threads)
            note(
                f"environments alone, random actions: {ceiling:,.0f} steps/s ({ceiling * _skip(loop):,.0f} frames/s), "
                "the ceiling of this run (--no-probe leaves this out)"
            )
        if end > 1.1 * settings.total_steps:
            note(f"the last update ends at {end:,} steps: updates are whole")
        started = time.perf_counter()
        compiled = loop.compile()
        note(f"compiled in {time.perf_counter() - started:.1f} s, about {memory_of(compiled)} per learner core")
        hosts.gather("compiled", True)  # on CPUs, hosts that meet in their first sum more than 30 s apart give up
        training = _Training(run, window, sinks, note, saver, last, interruption)
        if evaluation_due:
            training.ask()
        if (last > loop.learner.updates or evaluation_due) and not interruption.reached():
            training.start()
            # One host may stop whenever it is asked to; several do so after the same update.
            stop = lambda: hosts.count() == 1 and interruption.reached()
            trace.before(loop.learner.updates + 1, loop.learner.updates + 1)
            loop.run(last, trace.around(training.take), run.restarts, stop, training.save_without)
        training.drain()
        if interruption.signal is not None:
            training.save()
        elif run.best_params is not None:
            with contextlib.suppress(_Interrupted):
                measure = _measure(run, ABSOLUTE_TIMES * settings.eval_episodes, lambda: _raise_if(interruption))
                scoring.absolute(run, measure(run.best_params, run.evaluation_seed(2)), sinks)
    interruption.leave(run.directory, run.steps, settings.total_steps)
    return run


class _Training:
    """What happens between two updates, in the learner thread: rows, evaluations, checkpoints."""

    def __init__(
        self,
        run: Run,
        window: ReturnWindow,
        sinks: list[Sink],
        note: Callable[[str], None],
        saver: Saver,
        last: int,
        interruption: Interruption,
    ):
        loop, settings = run.loop, run.settings
        self._run, self._sinks, self._note, self._saver, self._last = run, sinks, note, saver, last
        self._interruption = interruption
        self._report = Report(loop, window, run.steps, run.updates)
        first = loop.learner.updates
        # Counted from the beginning of the run, so that a resumed one stops where it would have.
        before = run.steps // loop.steps_per_update
        self._stops = {first + stop - before for stop in settings.stops(before + last - first)}
        self._every = max(1, (last - first) // ROWS)
        self._clock, self._said, self._rows = Clock(run), time.perf_counter(), 0
        self._evaluations = None
        if settings.evaluations:
            supervisor = loop.supervisor
            measure = _measure(run, settings.eval_episodes, lambda: supervisor.go_on("evaluating"))
            seed = run.evaluation_seed(1)
            self._evaluations = Evaluations(supervisor, lambda params: measure(params, seed))

    def start(self) -> None:
        """Start what runs beside the training."""
        if self._evaluations is not None:
            self._evaluations.start()

    def ask(self) -> None:
        """Have the current params measured."""
        if self._evaluations is not None:
            self._evaluations.ask(self._run.steps, jax.device_get(self._run.params))

    def take(self, update: Update) -> bool:
        """Called after every update."""
        run, report = self._run, self._report
        report.add(update)
        run.steps, run.updates = report.steps_after(update.number), report.updates_after(update.number)
        bad = update.metrics["nonfinite_updates"] > 0
        stopped = hosts.count() > 1 and self._interruption.reached()
        if update.number % self._every == 0 or update.number in self._stops or bad or stopped:
            self._row()
        if bad and run.settings.nan == "stop":
            raise NonFiniteLoss(run.updates, run.directory)
        # A checkpoint may wait for the one before, and for other hosts that do: no stall as long as that may take.
        with run.loop.supervisor.patience("saving", WRITE_TIMEOUT_S):
            due = self._saver.due(update.number)
        last = update.number == self._last
        if update.number in self._stops:
            self.ask()
        if due or update.number in self._stops:
            with self._clock.paused():
                if last and self._evaluations is not None:
                    self._evaluations.wait()
                with run.loop.supervisor.patience("saving", WRITE_TIMEOUT_S):
                    self.save()
        self.drain()
        return stopped

    def drain(self) -> None:
        """Write the evaluations that are done."""
        for steps, params, result in self._evaluations.finished() if self._evaluations else ():
            scoring.consider(self._run, params, steps, result, self._sinks)

    @profile.phases("checkpoint")
    def save(self) -> None:
        """Write a checkpoint of the state after the last update."""
        run = self._run
        learner, evaluations = run.loop.learner, self._evaluations
        self._report.collect()
        meta = {
            "evaluation_due": evaluations is not None and evaluations.pending,
            "train_s": run.train_s,
            "updates": self._report.updates_after(learner.updates),
            "loop_updates": learner.updates,
            "learner_cores": mesh.size(run.loop.topology.learner_mesh),
            "steps_per_update": run.loop.steps_per_update,
            "restarts": run.restarts,
            "window": self._report.window.state(),
        }
        steps, state = self._report.steps_after(learner.updates), learner.state
        run.steps = steps
        self._saver.save(steps, state.params, state._replace(params=()), meta)

    def save_without(self, hanging: list[str]) -> None:
        """Write a checkpoint although these threads hang; where the learner does, there is no state to save.

        Of several hosts none can save by itself.
        """
        if "learner" not in hanging and hosts.count() == 1:
            self.save()
            self._saver.finish()  # the process ends next

    def _row(self) -> None:
        run = self._run
        lap = self._clock.lap()
        row = self._report.row(lap, run.train_s)
        run.write(row, self._sinks)
        self._rows += 1
        if time.perf_counter() - self._said > SAY_EVERY_S:
            self._said = time.perf_counter()
            self._note(starvation(row))


class _Interrupted(Exception):
    """A signal came during the last evaluation."""


def _raise_if(interruption: Interruption) -> None:
    if hosts.count() == 1 and interruption.reached():
        raise _Interrupted


def _measure(run: Run, episodes: int, between_steps: Callable[[], None]) -> Callable[[Any, int], Evaluation]:
    """`(params, seed) -> Evaluation`."""
    greedy = run.agent.greedy_step is not None
    measure = shared(evaluator, run.agent, run.env, episodes, greedy=greedy, between_steps=between_steps)
    return profile.phases("evaluation")(measure)


def _skip(loop: Sebulba) -> int:
    return loop.env.spec.frame_skip
