"""The calls of a run, one after another: rows, evaluations and checkpoints between them, to the end or a signal."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from anakin.loop import Anakin
from anakin.run import Run
from anakin.settings import Settings
from anakin.state import AnakinState, CallMetrics
from podracer import hosts, mesh, profile, replays, scoring
from podracer.errors import UserError
from podracer.evaluate import Evaluator, Measure, shared
from podracer.facts import memory_of
from podracer.interruption import Interruption
from podracer.metrics import EpisodeSums, ReturnWindow
from podracer.reporting import open_sinks
from podracer.runs import NonFiniteLoss
from podracer.saving import Saver
from podracer.scoring import Clock
from podracer.sinks import Sink
from podracer.watchdog import Watchdog


def go_on(
    run: Run,
    windows: list[ReturnWindow],
    sinks: Sequence[Sink] | None,
    notes: Sequence[str] = (),
    evaluation_due: bool = False,
) -> Run:
    """The loop of calls, from `run.steps` to the end."""
    loop, settings = run.loop, run.settings
    calls = math.ceil(settings.total_steps / loop.steps_per_call)
    total_steps = calls * loop.steps_per_call
    evaluator = None
    if settings.evaluations:
        greedy = run.agent.greedy_step is not None
        many = loop.members is not None
        evaluator = shared(Evaluator, run.agent, run.env, settings.eval_episodes, greedy=greedy, many=many)
    stops = settings.stops(calls)
    with (
        Saver(run) as saver,
        open_sinks(run, sinks, total_steps, loop.num_members) as (sinks, note),
        Interruption() as interruption,
        Watchdog(settings.stall_timeout, hosts.leave) as watchdog,
        profile.tracing(settings.profile, run.directory) as trace,
    ):
        _introduce(run, total_steps, note, notes)
        started = time.perf_counter()
        compiled = loop.compile()
        note(f"compiled in {time.perf_counter() - started:.1f} s, about {memory_of(compiled)} per core")
        hosts.gather("compiled", True)  # on CPUs, hosts that meet in their first sum more than 30 s apart give up
        clock, pending = Clock(run), None
        if evaluation_due and evaluator is not None and not interruption.reached():
            with clock.paused():
                _evaluate(run, evaluator, sinks)
            evaluation_due = False
        if interruption.reached():
            _save(run, windows, saver, evaluation_due)
        watchdog.beat()
        for call in range(run.steps // loop.steps_per_call + 1, calls + 1):
            if interruption.signal is not None:
                break
            last = call * loop.updates_per_call
            with trace.step(last - loop.updates_per_call + 1, last):
                run.state, metrics = loop.step(run.state)
            run.steps += loop.steps_per_call
            # A CPU may have done it all before `step` returned, which is then when the call ended.
            ended = time.perf_counter() if metrics.episodes.count.is_ready() else None  # type: ignore
            # The rows of the call before are written while this one runs.
            if pending is not None:
                _write(run, windows, sinks, clock, *pending)
            pending = (run.steps, metrics, ended)
            stopped = interruption.reached()  # asked once: a signal may come at any moment
            if saver.due(call) or call in stops or stopped:
                _write(run, windows, sinks, clock, *pending)
                pending = None
                with clock.paused(), watchdog.paused():
                    # Who sends a signal may not wait for long: what was due is made up for by `resume`.
                    if evaluator is not None and call in stops and not stopped:
                        _evaluate(run, evaluator, sinks)
                    _save(run, windows, saver, stopped and evaluator is not None and call in stops)
                interruption.reached()
            trace.after(last, metrics)
            watchdog.beat()
        with watchdog.paused():
            if interruption.signal is None and evaluator is not None and run.best_params is not None:
                greedy = run.agent.greedy_step is not None
                result = run.evaluate(10 * settings.eval_episodes, greedy, run.evaluation_seed(2), run.best_params)
                scoring.absolute(run, result, sinks)
        interruption.reached()
    interruption.leave(run.directory, run.steps, settings.total_steps)
    return run


def _introduce(run: Run, total_steps: int, note: Callable[[str], None], notes: Sequence[str]) -> None:
    """Say what begins now."""
    for text in (*notes, _describe(run.loop, run.settings), *replays.describe(run.agent, run.loop.runs_per_core)):
        note(text)
    if mesh.idle_cores(run.loop.mesh):
        note(mesh.IDLE)
    if total_steps > 1.1 * run.settings.total_steps:
        note(f"the last call ends at {total_steps:,} steps: calls are whole")


def _write(
    run: Run,
    windows: list[ReturnWindow],
    sinks: Sequence[Sink],
    clock: Clock,
    steps: int,
    metrics: CallMetrics,
    ended: float | None,
) -> None:
    """Rows of one call, one per member; stops the run where a loss was not finite."""
    loop = run.loop
    metrics = jax.device_get(metrics)  # blocks until the call has ended: the lap is honest
    lap = clock.lap(ended or time.perf_counter())
    many = loop.members is not None
    if not many:
        metrics = jax.tree.map(lambda leaf: leaf[None], metrics)
    if np.any(metrics.episodes.cut > 0):
        raise UserError(
            f"{loop.batch.spec.name} truncated an episode, but its spec says truncates=False, so that the value of the "
            "final observation is lost. Set truncates=True in the spec."
        )
    speed = loop.steps_per_call * len(windows) / lap  # of all members together
    frame_skip = loop.batch.spec.frame_skip
    for member, window in enumerate(windows):
        window.add(EpisodeSums(*(leaf[member] for leaf in metrics.episodes)))
        learner = {name: leaf[member] for name, leaf in metrics.learner.items()}
        row = {"member": member} if many else {}
        row |= {"steps": steps, "frames": steps * frame_skip, "updates": steps // loop.steps_per_update}
        row |= {"train_s": round(run.train_s, 4), "steps_per_s": speed, "frames_per_s": speed * frame_skip}
        row["num_cores"] = loop.num_cores
        row |= window.row() | {name: float(np.mean(leaf)) for name, leaf in learner.items()}
        skipped = learner.get("nonfinite_updates")
        if skipped is None:  # an agent that does not say so itself
            skipped = sum(~np.isfinite(leaf) for leaf in learner.values()) + np.zeros(loop.updates_per_call)
        row |= {"nonfinite_updates": float(np.sum(skipped))}
        run.write(row, sinks)
        if run.settings.nan == "stop" and np.any(skipped > 0):
            update = steps // loop.steps_per_update - loop.updates_per_call + int(np.argmax(skipped > 0)) + 1
            raise NonFiniteLoss(update, run.directory, member if many else None)


@profile.phases("evaluation")
def _evaluate(run: Run, evaluator: Measure, sinks: Sequence[Sink]) -> None:
    scoring.consider(run, run.params, run.steps, evaluator(run.params, run.evaluation_seed(1)), sinks)


@profile.phases("checkpoint")
def _save(run: Run, windows: list[ReturnWindow], saver: Saver, evaluation_due: bool) -> None:
    meta = {
        "evaluation_due": evaluation_due,
        "train_s": run.train_s,
        "batch_per_core": run.loop.batch_per_core,
        "num_cores": run.loop.num_cores,
        "updates_per_call": run.loop.updates_per_call,
        "windows": [window.state() for window in windows],
    }
    saver.save(run.steps, run.params, without_params(run.state), meta)


def without_params(state: AnakinState) -> AnakinState:
    """What a checkpoint keeps beside the params."""
    return state._replace(learner=state.learner._replace(params=()))


def _describe(loop: Anakin, settings: Settings) -> str:
    devices = mesh.describe(list(loop.mesh.devices.flat))
    count = loop.num_members
    runs = "" if loop.members is None else f"{count} run{'s' if count != 1 else ''} in one program, "
    updates = f"{loop.updates_per_call} update{'s' if loop.updates_per_call != 1 else ''} per call"
    return (
        f"{runs}{devices} x {loop.batch_per_core} environments{' per run' if runs else ''}, unroll "
        f"{loop.unroll_length}, {updates} ({loop.steps_per_call:,} steps)"
    )
