"""`anakin.train`: a whole run around the compiled loop, from settings to a checkpoint that evaluated best."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import pathlib
import time
import typing
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np

from anakin.loop import Anakin, AnakinState, CallMetrics, Members
from podracer import config, mesh
from podracer.checkpoint import Checkpoints
from podracer.envs.batch import Batch
from podracer.errors import UserError, check_divides, check_number, unknown
from podracer.evaluate import Evaluator
from podracer.metrics import EpisodeSums, ReturnWindow
from podracer.runs import (
    Interruption,
    NonFiniteLoss,
    check_new,
    check_sinks,
    create_directory,
    default_sinks,
    environment_facts,
)
from podracer.sinks import Sink, Terminal, drop_rows_after
from podracer.types import Agent


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a run on Anakin."""

    total_steps: int = 1_000_000
    """Agent decisions to train for, over all cores (per run, where many train in one program)."""
    batch_per_core: int = 64
    """Environments per core."""
    unroll_length: int = 32
    """Decisions per environment between two updates."""
    updates_per_call: int | None = None
    """Updates per compiled call; None: about a hundredth of the run."""
    seed: int = 0
    """Seed of everything random."""
    seeds: int = 1
    """Runs with consecutive seeds, trained in one program."""
    sweep: tuple[str, ...] = ()
    """Floats of the agent to vary, as name=v1,v2,...; all combinations train in one program."""
    starts: Literal["fresh", "cached", "optimistic"] = "fresh"
    """Where episodes start: anew, from the first episodes' starts, or anew but few per step."""
    prng: Literal["threefry2x32", "rbg", "unsafe_rbg"] = "threefry2x32"
    """JAX's random generator."""
    evaluations: int = 10
    """Greedy evaluations during the run; each also saves a checkpoint. 0: none, and ten checkpoints."""
    eval_episodes: int = 64
    """Episodes per evaluation."""
    keep: int = 2
    """Newest checkpoints to keep, beside the best."""
    nan: Literal["stop", "skip"] = "stop"
    """What a loss that is not finite does: stop the run, or skip that update and count it."""
    tensorboard: bool = False
    """Write TensorBoard files too."""
    wandb: bool = False
    """Log to Weights & Biases too."""

    def __post_init__(self):
        for name, kind in typing.get_type_hints(type(self)).items():
            value = getattr(self, name)
            if typing.get_origin(kind) is Literal and value not in typing.get_args(kind):
                raise unknown(
                    name, str(value), typing.get_args(kind), f"Expected {' or '.join(typing.get_args(kind))}."
                )
            if kind in (int, int | None) and value is not None:
                if not float(value).is_integer():
                    raise UserError(f"{name} is {value}; expected a whole number. Change {name}.")
                object.__setattr__(self, name, int(value))  # 1e6 is a number of steps, too
        for name in ("total_steps", "batch_per_core", "unroll_length", "updates_per_call", "seeds", "eval_episodes"):
            check_number(name, getattr(self, name), minimum=1)
        check_number("keep", self.keep, minimum=1)
        check_number("evaluations", self.evaluations, minimum=0)
        check_number("seed", self.seed, minimum=0, maximum=2**32 - self.seeds)


@dataclasses.dataclass
class Run:
    """A run, going on or finished."""

    agent: Agent
    env: Any
    loop: Anakin
    state: AnakinState
    settings: Settings
    directory: pathlib.Path | None
    steps: int = 0
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)  # the last row
    best_params: Any = None  # on the host, by the greedy evaluations; [M, ...] with many runs
    best_score: Any = None  # mean return of best_params when they were chosen; [M] with many runs
    best_steps: Any = None  # when that was; [M] with many runs
    absolute_score: Any = None  # mean return of best_params, measured once more at the end; [M] with many runs
    train_s: float = 0.0  # seconds of training, without compiling, evaluating and saving

    @property
    def params(self) -> Any:
        """The current params; [M, ...] with many runs."""
        return self.state.learner.params

    def evaluate(self, episodes: int = 128, greedy: bool = True, seed: int = 0, params: Any = None) -> Any:
        """Measure the current (or other) params; see `podracer.evaluate.Evaluator`."""
        many = self.loop.members is not None
        evaluator = Evaluator(self.agent, self.env, episodes, greedy=greedy, many=many)
        return evaluator(self.params if params is None else params, seed)


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
    **changes: Any,
) -> Run:
    """Train `agent` on `env` on every core of this host.

    Args:
      agent: any `Agent`.
      env: an environment or a `Batch` of one.
      settings: see `Settings`; `changes` are fields of it, e.g. `total_steps=10_000_000`. `sweep` may also be a
        dict `{"learning_rate": [1e-3, 3e-4]}`.
      cores: how many cores; None takes all that JAX has.
      run_dir: a new directory for config, metrics and checkpoints; None writes nothing.
      recipe: names that make `agent` and `env` again, for `config.json`; None: found out where possible.
      sinks: what takes the rows of metrics, beside the files of `run_dir`; None: a terminal.
      notes: what the terminal says first, now that nothing can be refused any more.

    Raises:
      UserError: something given cannot work; nothing was compiled or written.
      NonFiniteLoss: with `nan="stop"`.
      KeyboardInterrupt, SystemExit: after Ctrl-C or SIGTERM, when the checkpoint is written.
    """
    if isinstance(changes.get("sweep"), dict):
        pairs = changes["sweep"].items()
        changes["sweep"] = tuple(f"{name}={','.join(map(repr, map(float, values)))}" for name, values in pairs)
    settings = _change(settings or Settings(), changes)
    directory = None if run_dir is None else pathlib.Path(run_dir)
    check_new(directory)
    check_sinks(directory, settings.tensorboard, settings.wandb)
    loop = _build_loop(agent, env, settings, cores)
    loop.check()
    if directory is not None:
        if recipe is None and loop.batch == Batch(loop.batch.env, starts=settings.starts):
            recipe = config.describe(agent, loop.batch.env)
        facts = environment_facts(loop.mesh)
        content = {"architecture": "anakin", "recipe": recipe and dataclasses.asdict(recipe)}
        content |= {"settings": dataclasses.asdict(settings), "num_cores": loop.num_cores, **facts}
        create_directory(directory, content)
    state = loop.init(settings.seed)
    run = Run(agent, env, loop, state, settings, directory)
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
      cores: another number of cores; the environments are spread over them anew.
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
    settings = _change(Settings(), {**content["settings"], "sweep": tuple(content["settings"].get("sweep", ()))})
    settings = _change(settings, {} if total_steps is None else {"total_steps": total_steps})
    check_sinks(directory, settings.tensorboard, settings.wandb)
    checkpoints = Checkpoints(directory / "checkpoints", settings.keep)
    meta = checkpoints.meta()
    if meta["steps"] >= settings.total_steps and not meta["evaluation_due"]:
        raise UserError(
            f"{directory} is finished: it has {meta['steps']:,} of {settings.total_steps:,} steps. "
            "Give a larger --total-steps to go on."
        )
    if settings.seeds == 1 and not settings.sweep:
        environments = meta["batch_per_core"] * meta["num_cores"]
        target = mesh.size(mesh.make(cores))
        check_divides("the number of environments", environments, "cores", target)
        settings = _change(settings, {"batch_per_core": environments // target})
    loop = _build_loop(agent, env, _change(settings, {"updates_per_call": meta["updates_per_call"]}), cores)
    like = loop.init(settings.seed)
    params = checkpoints.params(like.learner.params)
    state = checkpoints.state(_without_params(like))
    state = state._replace(learner=state.learner._replace(params=params))
    checkpoints.close()
    run = Run(agent, env, loop, state, settings, directory, steps=meta["steps"], train_s=meta["train_s"])
    best = Checkpoints(directory / "best", 1)
    if best.steps():
        run.best_params = jax.device_get(best.params(like.learner.params))
        run.best_score, run.best_steps = (np.asarray(best.meta()[name]) for name in ("score", "chosen_at"))
    best.close()
    windows = [ReturnWindow() for _ in meta["windows"]]
    for window, saved in zip(windows, meta["windows"], strict=True):
        window.restore(saved)
    # A run that was killed has rows from after its last checkpoint: they will be written again.
    drop_rows_after(directory / "metrics.jsonl", run.steps)
    return _run(run, windows, sinks, evaluation_due=meta["evaluation_due"])


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
    terminal = None
    if sinks is None:
        label = f"{run.agent.name} on {loop.batch.spec.name}"
        terminal = Terminal(calls * loop.steps_per_call, label, _num_members(loop))
    note = terminal.note if terminal else lambda text: None
    sinks = [*(sinks or ()), *([terminal] if terminal else [])]
    checkpoints = Checkpoints(run.directory / "checkpoints", settings.keep) if run.directory else None
    evaluator = None
    if settings.evaluations:
        greedy = run.agent.greedy_step is not None
        many = loop.members is not None
        evaluator = Evaluator(run.agent, run.env, settings.eval_episodes, greedy=greedy, many=many)
    num_stops = settings.evaluations or 10
    stops = {round(n * calls / num_stops) for n in range(1, num_stops + 1)} | {calls}
    try:
        with contextlib.ExitStack() as stack:
            for sink in sinks:
                stack.callback(sink.close)
            for sink in default_sinks(run.directory, settings.tensorboard, settings.wandb, run.steps):
                stack.callback(sink.close)
                sinks.append(sink)
            interruption = stack.enter_context(Interruption())
            for text in (*notes, _describe(loop, settings)):
                note(text)
            if mesh.idle_cores(loop.mesh):
                note(
                    "JAX was already running with fewer devices than this machine has cores. To use all of them, call "
                    "podracer.mesh.start_backend() before anything else."
                )
            if calls * loop.steps_per_call > 1.1 * settings.total_steps:
                note(f"the last call ends at {calls * loop.steps_per_call:,} steps: calls are whole")
            started = time.perf_counter()
            compiled = loop.compile()
            note(f"compiled in {time.perf_counter() - started:.1f} s, {_memory(compiled)}")
            clock, pending = _Clock(run), None
            if evaluation_due and evaluator is not None:
                with clock.paused():
                    _evaluate(run, evaluator, sinks)
            for call in range(run.steps // loop.steps_per_call + 1, calls + 1):
                run.state, metrics = loop.step(run.state)
                run.steps += loop.steps_per_call
                # A CPU may have done it all before `step` returned, which is then when the call ended.
                ended = time.perf_counter() if metrics.episodes.count.is_ready() else None  # type: ignore
                # The rows of the call before are written while this one runs.
                if pending is not None:
                    _write(run, windows, sinks, clock, *pending)
                pending = (run.steps, metrics, ended)
                stopped = interruption.signal is not None  # asked once: a signal may come at any moment
                if call in stops or stopped:
                    _write(run, windows, sinks, clock, *pending)
                    pending = None
                    with clock.paused():
                        # Who sends a signal may not wait for long: what was due is made up for by `resume`.
                        if evaluator is not None and not stopped:
                            _evaluate(run, evaluator, sinks)
                        if checkpoints is not None:
                            _save(run, windows, checkpoints, stopped and evaluator is not None and call in stops)
                if interruption.signal is not None and pending is None:
                    break
            if interruption.signal is None and evaluator is not None and run.best_params is not None:
                _absolute(run, sinks)
        interruption.leave(run.directory, run.steps)
    finally:
        if checkpoints is not None:
            checkpoints.close()
    return run


class _Clock:
    """Training time: between the ends of two calls, without what happens in `paused`; added to `run.train_s`."""

    def __init__(self, run: Run):
        self._run, self._last = run, time.perf_counter()

    def lap(self, now: float) -> float:
        lap, self._last = now - self._last, now
        self._run.train_s += lap
        return lap

    @contextlib.contextmanager
    def paused(self):
        before = time.perf_counter()
        yield
        self._last += time.perf_counter() - before


def _write(
    run: Run,
    windows: list[ReturnWindow],
    sinks: Sequence[Sink],
    clock: _Clock,
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
        run.metrics = row
        for sink in sinks:
            sink.write(row)
        if run.settings.nan == "stop" and np.any(skipped > 0):
            update = steps // loop.steps_per_update - loop.updates_per_call + int(np.argmax(skipped > 0)) + 1
            raise NonFiniteLoss(update, run.directory, member if many else None)


def _evaluate(run: Run, evaluator: Evaluator, sinks: Sequence[Sink]) -> None:
    """Measure the current params, on start states of their own, and keep them where they are the best so far."""
    result = evaluator(run.params, _seed(run, 1))
    scores = result.returns.mean(-1)
    if run.best_score is None:
        better = np.ones(scores.shape, bool)
    else:
        # The later of equals: it has seen more.
        better = (scores >= run.best_score) | (np.isnan(run.best_score) & ~np.isnan(scores))
    if np.any(better):
        now = jax.device_get(run.params)
        if run.best_params is None or not better.shape:
            run.best_params, run.best_score = now, scores
            run.best_steps = np.full(scores.shape, run.steps)
        else:

            def choose(new, old):
                return np.where(better.reshape(better.shape + (1,) * (new.ndim - 1)), new, old)

            run.best_params = jax.tree.map(choose, now, run.best_params)
            run.best_score = np.where(better, scores, run.best_score)
            run.best_steps = np.where(better, run.steps, run.best_steps)
        if run.directory is not None:
            best = Checkpoints(run.directory / "best", 1)
            meta = {"score": run.best_score.tolist(), "chosen_at": run.best_steps.tolist()}
            best.save(run.steps, run.best_params, (), meta)
            best.close()
    _write_evaluation(run, sinks, "eval", result.summary())


def _absolute(run: Run, sinks: Sequence[Sink]) -> None:
    """Measure the best params once more, on ten times as many new episodes: choosing them was biased upwards."""
    result = run.evaluate(
        10 * run.settings.eval_episodes, run.agent.greedy_step is not None, _seed(run, 2), run.best_params
    )
    run.absolute_score = result.returns.mean(-1)
    _write_evaluation(run, sinks, "absolute", result.summary())


def _seed(run: Run, offset: int) -> int:
    """A seed for the run's evaluations; it wraps around at 2**32."""
    return (run.settings.seed + offset) % 2**32


def _write_evaluation(run: Run, sinks: Sequence[Sink], prefix: str, summary: dict[str, Any]) -> None:
    members = [None] if run.loop.members is None else range(len(run.loop.members))
    for member in members:
        chosen = {k: v if member is None or not isinstance(v, list) else v[member] for k, v in summary.items()}
        row = {"steps": run.steps} | ({} if member is None else {"member": member})
        row |= {f"{prefix}_{name}": value for name, value in chosen.items()}
        run.metrics = run.metrics | row
        for sink in sinks:
            sink.write(row)


def _save(run: Run, windows: list[ReturnWindow], checkpoints: Checkpoints, evaluation_due: bool) -> None:
    meta = {
        "evaluation_due": evaluation_due,
        "train_s": run.train_s,
        "batch_per_core": run.loop.batch_per_core,
        "num_cores": run.loop.num_cores,
        "updates_per_call": run.loop.updates_per_call,
        "windows": [window.state() for window in windows],
    }
    checkpoints.save(run.steps, run.params, _without_params(run.state), meta)


def _without_params(state: AnakinState) -> AnakinState:
    return state._replace(learner=state.learner._replace(params=()))


def _build_loop(agent: Agent, env: Any, settings: Settings, cores: int | None) -> Anakin:
    batch = env if isinstance(env, Batch) else Batch(env, starts=settings.starts)
    members = _members(agent, settings)
    num_cores = mesh.size(mesh.make(cores))
    updates = settings.updates_per_call
    if updates is None:
        per_update = settings.batch_per_core * settings.unroll_length * (num_cores if members is None else 1)
        # Short enough for Ctrl-C and the progress bar, long enough that Python does not matter.
        most = 2**18 if jax.default_backend() == "cpu" else 2**22
        updates = max(1, min(settings.total_steps // 100, most) // per_update)
    return Anakin(agent, batch, settings.batch_per_core, settings.unroll_length, updates, cores, members, settings.prng)


def _members(agent: Agent, settings: Settings) -> Members | None:
    """The runs that `seeds` and `sweep` ask for: all combinations."""
    if settings.seeds == 1 and not settings.sweep:
        return None
    names, choices = [], []
    fields = {} if agent.config is None else dataclasses.asdict(agent.config)
    floats = [name for name, value in fields.items() if isinstance(value, float)]
    for item in settings.sweep:
        name, _, values = item.partition("=")
        name = name.strip().replace("-", "_")
        if name not in floats:
            raise UserError(
                f"sweep has '{name}', which is not a float of {agent.name}'s config; "
                f"expected one of {', '.join(floats)}."
            )
        try:
            numbers = tuple(float(value) for value in values.split(","))
        except ValueError:
            raise UserError(f"sweep has '{item}'; expected name=v1,v2,... with numbers.") from None
        for number in numbers:
            dataclasses.replace(agent.config, **{name: number})  # the config's own checks
        names.append(name)
        choices.append(numbers)
    if len(set(names)) < len(names):
        raise UserError(f"sweep names a setting twice ({', '.join(names)}); expected each once, with all its values.")
    combinations = list(itertools.product(*choices, range(settings.seeds)))
    floats_of = {name: tuple(c[i] for c in combinations) for i, name in enumerate(names)}
    return Members(tuple(c[-1] for c in combinations), floats_of)


def _num_members(loop: Anakin) -> int:
    return 1 if loop.members is None else len(loop.members)


def _change(settings: Settings, changes: dict[str, Any]) -> Settings:
    known = {field.name for field in dataclasses.fields(Settings)}
    strange = sorted(set(changes) - known)
    if strange:
        raise UserError(f"unknown setting '{strange[0]}'; expected one of {', '.join(sorted(known))}.")
    return dataclasses.replace(settings, **changes)


def _describe(loop: Anakin, settings: Settings) -> str:
    devices = mesh.describe(list(loop.mesh.devices.flat))
    count = _num_members(loop)
    runs = "" if loop.members is None else f"{count} run{'s' if count != 1 else ''} in one program, "
    updates = f"{loop.updates_per_call} update{'s' if loop.updates_per_call != 1 else ''} per call"
    return (
        f"{runs}{devices} x {loop.batch_per_core} environments{' per run' if runs else ''}, unroll "
        f"{loop.unroll_length}, {updates} ({loop.steps_per_call:,} steps)"
    )


def _memory(compiled: Any) -> str:
    analysis = compiled.memory_analysis()
    if analysis is None:
        return "memory not known"
    used = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + analysis.output_size_in_bytes
    return f"about {max(math.ceil((used - analysis.alias_size_in_bytes) / 1e6), 1):,} MB per core"
