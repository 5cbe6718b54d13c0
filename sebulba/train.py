"""`sebulba.train`: a whole run around the threads, from settings to a checkpoint that evaluated best."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from podracer import config, hosts, mesh, profile, prometheus, scoring
from podracer.errors import UserError
from podracer.evaluate import Evaluation, evaluator, shared
from podracer.metrics import ReturnWindow
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
from sebulba import probe
from sebulba.evaluations import Evaluations
from sebulba.loop import Sebulba, Update
from sebulba.report import Report, starvation
from sebulba.settings import Settings, build_loop

ROWS = 1000  # per run, about
SAY_EVERY_S = 60.0  # who waits for whom
# The absolute score is of so many times the episodes of one evaluation: whole Atari games take long.
ABSOLUTE_TIMES = 2


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
    """Train `agent` on `env` with threads that act and cores that learn, on every host.

    Where several hosts are connected (`podracer.hosts.connect`), each has its own environments and actors, and all
    learn together.

    Args:
      agent: any `Agent`.
      env: a host environment; an environment that can be compiled (or a `Batch` of one) is bridged.
      settings: see `Settings`; `changes` are fields of it, e.g. `actor_cores=2`.
      cores: how many cores of each host, for acting and learning together; None takes all that JAX has.
      run_dir: a new directory for config, metrics and checkpoints; None writes nothing.
      recipe: names that make `agent` and `env` again, for `config.json`; None: found out where possible.
      sinks: what takes the rows of metrics, beside the files of `run_dir`; None: a terminal.
      notes: what the terminal says first.
      or_resume: go on where `run_dir` holds this very run with a checkpoint, so that the same command can be repeated.

    Raises:
      UserError: something given cannot work, or is not the same on all hosts; nothing was compiled or written.
      NonFiniteLoss: with `nan="stop"`.
      KeyboardInterrupt, SystemExit: after Ctrl-C or SIGTERM, when the checkpoint is written.
      the first exception of any thread.
    """
    settings = change(settings or Settings(), changes)
    directory = None if run_dir is None else pathlib.Path(run_dir)
    if not or_resume:
        check_new(directory)
    check_sinks(directory, settings.tensorboard, settings.wandb)
    agree(settings, cores, recipe=_as_dict(recipe))
    loop = build_loop(agent, env, settings, cores)
    profile.check(settings.profile, directory, math.ceil(settings.total_steps / loop.steps_per_update))
    prometheus.check_port(settings.metrics_port)
    loop.check()
    settings = change(settings, {"batch_size": loop.env.batch_size})
    if directory is not None:
        content = {"architecture": "sebulba", "recipe": _as_dict(recipe or config.describe(agent, env))}
        content |= {"settings": dataclasses.asdict(settings), "num_cores": loop.topology.num_cores}
        if or_resume and resumable(directory, content):
            return resume(directory, cores=cores, total_steps=settings.total_steps, agent=agent, env=env, sinks=sinks)
        create_directory(directory, content | environment_facts(loop.topology.learner_mesh), or_resume)
    return _run(Run(agent, env, loop, settings, directory), ReturnWindow(), sinks, notes)


def resume(
    run_dir: str | pathlib.Path,
    *,
    cores: int | None = None,
    total_steps: int | None = None,
    agent: Agent | None = None,
    env: Any = None,
    sinks: Sequence[Sink] | None = None,
    **changes: Any,
) -> Run:
    """Go on from the newest checkpoint of a run directory, on as many cores and threads as you like.

    The environments start anew, from start states that the run has not seen.

    Args:
      run_dir: what `train` wrote.
      cores: how many cores; None takes all.
      total_steps: another end; None keeps the run's own.
      agent, env: the objects, where the run was made from Python objects without names.
      sinks: as in `train`.
      changes: other settings from here on: `actor_cores`, `threads_per_core`, `batch_size`, `lag`, ...

    Raises:
      UserError: there is no checkpoint, or it does not fit.
    """
    directory = pathlib.Path(run_dir)
    content = config.read(directory, "sebulba")
    if agent is None or env is None:
        built = config.build(config.read_recipe(directory))
        agent, env = agent or built[0], built[1] if env is None else env
    settings = change(change(Settings(), content["settings"]), changes)
    settings = change(settings, {} if total_steps is None else {"total_steps": total_steps})
    check_sinks(directory, settings.tensorboard, settings.wandb)
    prometheus.check_port(settings.metrics_port)
    checkpoints = open_checkpoints(directory)
    agree(settings, cores)

    def make(meta: dict[str, Any]) -> tuple[Sebulba, dict[str, Any]]:
        """What goes on from such a checkpoint, and what is read of it."""
        _check_unfinished(directory, settings, meta)
        loop = build_loop(agent, env, settings, cores)
        like = loop.learner.state
        _check_memory(directory, meta, like, mesh.size(loop.topology.learner_mesh))
        return loop, {"params": like.params, "state": like._replace(params=())}

    meta, loop = checkpoints.choose(make)
    like = loop.learner.state
    loop.check()
    params = checkpoints.params(like.params)
    state = checkpoints.state(like._replace(params=()))
    loop.learner.state, loop.learner.updates = state._replace(params=params), meta["loop_updates"]
    counters = {name: meta[name] for name in ("steps", "updates", "train_s")}
    run = Run(agent, env, loop, settings, directory, restarts=meta["restarts"] + 1, **counters)
    scoring.restore_best(run, jax.eval_shape(lambda: agent.initial_learner_state(jax.random.key(0))).params)
    window = ReturnWindow()
    window.restore(meta["window"])
    before, now = meta.get("steps_per_update", loop.steps_per_update), loop.steps_per_update
    notes = [] if before == now else [f"an update is now of {now:,} steps; it was of {before:,}"]
    return _run(run, window, sinks, notes, evaluation_due=meta["evaluation_due"])


def _check_unfinished(directory: pathlib.Path, settings: Settings, meta: dict[str, Any]) -> None:
    """Refuse to go on where there is nothing left to do.

    Raises:
      Finished: it is so.
    """
    if meta["steps"] >= settings.total_steps and not meta["evaluation_due"]:
        raise Finished(
            f"{directory} is finished: it has {meta['steps']:,} of {settings.total_steps:,} steps. "
            "Give a larger --total-steps to go on."
        )


def _check_memory(directory: pathlib.Path, meta: dict[str, Any], state: Any, cores: int) -> None:
    """Refuse other learner cores than the replay is kept on.

    Raises:
      UserError: they are others.
    """
    if jax.tree.leaves(state.memory) and meta["learner_cores"] != cores:
        raise UserError(
            f"{directory} keeps a replay on each of {meta['learner_cores']} learner cores; this is {cores}. "
            "Resume with as many learner cores."
        )


def _run(
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
        for text in (*notes, loop.describe(), *run.agent.notes, *protocol):
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
    interruption.leave(run.directory, run.steps)
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
        due = self._saver.due(update.number)
        if update.number in self._stops:
            self.ask()
            with self._clock.paused():
                if update.number == self._last and self._evaluations is not None:
                    self._evaluations.wait()
                self.save()
        elif due:
            with self._clock.paused():
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


def _as_dict(recipe: config.Recipe | None) -> dict[str, Any] | None:
    return None if recipe is None else dataclasses.asdict(recipe)


def _skip(loop: Sebulba) -> int:
    return loop.env.spec.frame_skip
