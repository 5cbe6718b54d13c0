"""`sebulba.train`: a whole run around the threads, from settings to a checkpoint that evaluated best."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import jax

from podracer import config, mesh, profile, replays, scoring
from podracer.facts import environment_facts
from podracer.metrics import ReturnWindow
from podracer.runs import agree, check_new, check_reports, check_unfinished, create_directory, own, reopen, resumable
from podracer.saving import open_checkpoints
from podracer.settings import change
from podracer.sinks import Sink
from podracer.types import Agent, LearnerState
from sebulba.loop import Sebulba
from sebulba.run import Run
from sebulba.settings import Settings, build_loop
from sebulba.training import go_on


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
    check_reports(settings, directory)
    agree(settings, cores, recipe=_as_dict(recipe))
    loop = build_loop(agent, env, settings, cores)
    profile.check(settings.profile, directory, math.ceil(settings.total_steps / loop.steps_per_update))
    loop.check()
    settings = change(settings, {"batch_size": loop.env.batch_size})
    if directory is not None:
        content = {"architecture": "sebulba", "recipe": _as_dict(recipe or config.describe(agent, env))}
        content |= {"settings": dataclasses.asdict(settings), "num_cores": loop.topology.num_cores}
        if or_resume and resumable(directory, content):
            return resume(directory, cores=cores, agent=agent, env=env, sinks=sinks, **own(settings))
        create_directory(directory, content | environment_facts(loop.topology.learner_mesh), or_resume)
    return go_on(Run(agent, env, loop, settings, directory), ReturnWindow(), sinks, notes)


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

    The environments start anew, from start states that the run has not seen. On another number of learner cores a
    replay begins empty.

    Args:
      run_dir: what `train` wrote.
      cores: how many cores; None takes all.
      total_steps: another end; None keeps the run's own.
      agent, env: the objects, where the run was made from Python objects without names.
      sinks: as in `train`.
      changes: other settings from here on: `actor_cores`, `threads_per_core`, `batch_size`, `lag`, `profile`, ...

    Raises:
      UserError: there is no checkpoint, or it does not fit.
    """
    directory = pathlib.Path(run_dir)
    changes |= {} if total_steps is None else {"total_steps": total_steps}
    agent, env, settings = reopen(directory, "sebulba", Settings(), changes, agent, env)
    checkpoints = open_checkpoints(directory, place=settings.checkpoint_dir)
    agree(settings, cores)

    def make(meta: dict[str, Any]) -> tuple[Sebulba, dict[str, Any]]:
        """What goes on from such a checkpoint, and what is read of it."""
        check_unfinished(directory, settings, meta)
        loop = build_loop(agent, env, settings, cores)
        like = loop.learner.state
        return loop, {"params": like.params, "state": rest(meta, loop)}

    def rest(meta: dict[str, Any], loop: Sebulba) -> LearnerState:
        """What is read beside the params."""
        now = mesh.size(loop.topology.learner_mesh)
        return replays.left_out(loop.learner.state, meta["learner_cores"], now)._replace(params=())

    meta, loop = checkpoints.choose(make)
    like = loop.learner.state
    loop.check()
    if "profile" in changes:
        profile.check(settings.profile, directory, math.ceil(settings.total_steps / loop.steps_per_update))
    params = checkpoints.params(like.params)
    state = replays.begun_anew(checkpoints.state(rest(meta, loop)), like)
    loop.learner.state, loop.learner.updates = state._replace(params=params), meta["loop_updates"]
    counters = {name: meta[name] for name in ("steps", "updates", "train_s")}
    run = Run(agent, env, loop, settings, directory, restarts=meta["restarts"] + 1, **counters)
    scoring.restore_best(run, jax.eval_shape(lambda: agent.initial_learner_state(jax.random.key(0))).params)
    window = ReturnWindow()
    window.restore(meta["window"])
    before, now = meta.get("steps_per_update", loop.steps_per_update), loop.steps_per_update
    notes = [] if before == now else [f"an update is now of {now:,} steps; it was of {before:,}"]
    notes += profile.missed(settings.profile, loop.learner.updates)
    notes += replays.describe_anew(agent, meta["learner_cores"], mesh.size(loop.topology.learner_mesh))
    return go_on(run, window, sinks, notes, evaluation_due=meta["evaluation_due"])


def _as_dict(recipe: config.Recipe | None) -> dict[str, Any] | None:
    return None if recipe is None else dataclasses.asdict(recipe)
