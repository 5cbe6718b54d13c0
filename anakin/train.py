"""`anakin.train`: a whole run around the compiled loop, from settings to a checkpoint that evaluated best."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from anakin.loop import Anakin, AnakinState, CallMetrics
from anakin.settings import Settings, build_loop
from podracer import config, hosts, mesh, profile, prometheus, scoring
from podracer.envs.batch import Batch
from podracer.errors import UserError, check_divides
from podracer.evaluate import Evaluation, Evaluator, Measure, shared
from podracer.metrics import EpisodeSums, ReturnWindow
from podracer.runs import (
    Finished,
    Interruption,
    NonFiniteLoss,
    agree,
    check_new,
    check_sinks,
    create_directory,
    environment_facts,
    memory_of,
    open_sinks,
    resumable,
)
from podracer.saving import Saver, open_checkpoints
from podracer.scoring import Clock, ScoredRun
from podracer.settings import change
from podracer.sinks import Sink
from podracer.types import Agent
from podracer.watchdog import Watchdog


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


def train(
    agent: Agent,
    env: Any,
    settings: Settings | None = None,
    *,
    cores: int | None = None,
    run_dir: str | pathlib.Path | None = None,
    recipe: config.Recipe | None = None,
    sinks: Sequence[Sink] | None = None,
    notes: Sequence[str] = (),
    or_resume: bool = False,
    **changes: Any,
) -> Run:
    """Train `agent` on `env` on every core, of all hosts where they are connected (`podracer.hosts.connect`).

    Args:
      agent: any `Agent`.
      env: an environment or a `Batch` of one.
      settings: see `Settings`; `changes` are fields of it, e.g. `total_steps=10_000_000`. `sweep` may also be a
        dict `{"learning_rate": [1e-3, 3e-4]}`.
      cores: how many cores of each host; None takes all that JAX has.
      run_dir: a new directory for config, metrics and checkpoints; None writes nothing.
      recipe: names that make `agent` and `env` again, for `config.json`; None: found out where possible.
      sinks: what takes the rows of metrics, beside the files of `run_dir`; None: a terminal.
      notes: what the terminal says first, now that nothing can be refused any more.
      or_resume: go on where `run_dir` holds this very run with a checkpoint, so that the same command can be repeated.

    Raises:
      UserError: something given cannot work, or is not the same on all hosts; nothing was compiled or written.
      NonFiniteLoss: with `nan="stop"`.
      KeyboardInterrupt, SystemExit: after Ctrl-C or SIGTERM, when the checkpoint is written.
    """
    if isinstance(changes.get("sweep"), dict):
        pairs = changes["sweep"].items()
        changes["sweep"] = tuple(f"{name}={','.join(map(repr, map(float, values)))}" for name, values in pairs)
    settings = change(settings or Settings(), changes)
    directory = None if run_dir is None else pathlib.Path(run_dir)
    if not or_resume:
        check_new(directory)
    check_sinks(directory, settings.tensorboard, settings.wandb)
    hosts.agree(
        {"settings": dataclasses.asdict(settings), "recipe": recipe and dataclasses.asdict(recipe), "cores": cores}
    )
    loop = build_loop(agent, env, settings, cores)
    profile.check(settings.profile, directory, math.ceil(settings.total_steps / loop.steps_per_update))
    prometheus.check_port(settings.metrics_port)
    loop.check()
    if directory is not None:
        if recipe is None and loop.batch == Batch(loop.batch.env, starts=settings.starts):
            recipe = config.describe(agent, loop.batch.env)
        facts = environment_facts(loop.mesh)
        content = {"architecture": "anakin", "recipe": recipe and dataclasses.asdict(recipe)}
        content |= {"settings": dataclasses.asdict(settings), "num_cores": loop.num_cores, **facts}
        if or_resume and resumable(directory, content):
            return resume(directory, cores=cores, total_steps=settings.total_steps, agent=agent, env=env, sinks=sinks)
        create_directory(directory, content, or_resume)
    state = loop.init(settings.seed)
    run = Run(agent, env, loop, settings, directory, state=state)
    return _run(run, [ReturnWindow() for _ in range(_num_members(loop))], sinks, notes)


def resume(
    run_dir: str | pathlib.Path,
    *,
    cores: int | None = None,
    total_steps: int | None = None,
    agent: Agent | None = None,
    env: Any = None,
    sinks: Sequence[Sink] | None = None,
) -> Run:
    """Go on from the newest checkpoint of a run directory, bit for bit where the number of cores is the same.

    Args:
      run_dir: what `train` wrote.
      cores: another number of cores of each host; the environments are spread over all of them anew.
      total_steps: another end; None keeps the run's own.
      agent, env: the objects, where the run was made from Python objects without names.
      sinks: as in `train`.

    Raises:
      UserError: there is no checkpoint, or it does not fit.
    """
    directory = pathlib.Path(run_dir)
    content = config.read(directory, "anakin")
    if agent is None or env is None:
        built = config.build(config.read_recipe(directory))
        agent, env = agent or built[0], built[1] if env is None else env
    settings = change(Settings(), {**content["settings"], "sweep": tuple(content["settings"].get("sweep", ()))})
    settings = change(settings, {} if total_steps is None else {"total_steps": total_steps})
    check_sinks(directory, settings.tensorboard, settings.wandb)
    prometheus.check_port(settings.metrics_port)
    checkpoints = open_checkpoints(directory)
    agree(settings, cores)

    def make(meta: dict[str, Any]) -> tuple[tuple[Settings, Anakin, AnakinState], dict[str, Any]]:
        """What goes on from such a checkpoint, and what is read of it."""
        found = _settings_for(settings, meta, directory, cores)
        loop = build_loop(agent, env, change(found, {"updates_per_call": meta["updates_per_call"]}), cores)
        like = loop.init(found.seed)
        return (found, loop, like), {"params": like.learner.params, "state": _without_params(like)}

    meta, (settings, loop, like) = checkpoints.choose(make)
    params = checkpoints.params(like.learner.params)
    state = checkpoints.state(_without_params(like))
    state = state._replace(learner=state.learner._replace(params=params))
    run = Run(agent, env, loop, settings, directory, state=state, steps=meta["steps"], train_s=meta["train_s"])
    scoring.restore_best(run, like.learner.params)
    windows = [ReturnWindow() for _ in meta["windows"]]
    for window, saved in zip(windows, meta["windows"], strict=True):
        window.restore(saved)
    return _run(run, windows, sinks, evaluation_due=meta["evaluation_due"])


def _settings_for(settings: Settings, meta: dict[str, Any], directory: pathlib.Path, cores: int | None) -> Settings:
    """`settings` with the environments of a checkpoint spread over these cores.

    Raises:
      UserError: the run is finished, or they do not divide.
    """
    if meta["steps"] >= settings.total_steps and not meta["evaluation_due"]:
        raise Finished(
            f"{directory} is finished: it has {meta['steps']:,} of {settings.total_steps:,} steps. "
            "Give a larger --total-steps to go on."
        )
    if settings.seeds > 1 or settings.sweep:
        return settings
    environments = meta["batch_per_core"] * meta["num_cores"]  # of all hosts
    target = mesh.size(mesh.make(cores))
    check_divides("the number of environments", environments, "cores", target)
    return change(settings, {"batch_per_core": environments // target})


def _run(
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
        open_sinks(run, sinks, total_steps, _num_members(loop)) as (sinks, note),
        Interruption() as interruption,
        Watchdog(settings.stall_timeout) as watchdog,
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
    interruption.leave(run.directory, run.steps)
    return run


def _introduce(run: Run, total_steps: int, note: Callable[[str], None], notes: Sequence[str]) -> None:
    """Say what begins now."""
    for text in (*notes, _describe(run.loop, run.settings), *run.agent.notes):
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
    saver.save(run.steps, run.params, _without_params(run.state), meta)


def _without_params(state: AnakinState) -> AnakinState:
    return state._replace(learner=state.learner._replace(params=()))


def _num_members(loop: Anakin) -> int:
    return 1 if loop.members is None else len(loop.members)


def _describe(loop: Anakin, settings: Settings) -> str:
    devices = mesh.describe(list(loop.mesh.devices.flat))
    count = _num_members(loop)
    runs = "" if loop.members is None else f"{count} run{'s' if count != 1 else ''} in one program, "
    updates = f"{loop.updates_per_call} update{'s' if loop.updates_per_call != 1 else ''} per call"
    return (
        f"{runs}{devices} x {loop.batch_per_core} environments{' per run' if runs else ''}, unroll "
        f"{loop.unroll_length}, {updates} ({loop.steps_per_call:,} steps)"
    )
