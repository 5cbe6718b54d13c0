"""`anakin.train`: a whole run around the compiled loop, from settings to a checkpoint that evaluated best."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from anakin.calls import go_on, without_params
from anakin.loop import Anakin
from anakin.run import Run
from anakin.settings import Settings, build_loop
from anakin.state import AnakinState
from podracer import config, mesh, profile, replays, scoring
from podracer.envs.batch import Batch
from podracer.errors import check_divides
from podracer.facts import environment_facts
from podracer.metrics import ReturnWindow
from podracer.runs import (
    agree,
    check_new,
    check_own,
    check_reports,
    check_unfinished,
    create_directory,
    own,
    reopen,
    resumable,
)
from podracer.saving import open_checkpoints
from podracer.settings import change
from podracer.sinks import Sink
from podracer.types import Agent


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
    check_reports(settings, directory)
    agree(settings, cores, recipe=recipe and dataclasses.asdict(recipe))
    loop = build_loop(agent, env, settings, cores)
    profile.check(settings.profile, directory, math.ceil(settings.total_steps / loop.steps_per_update))
    loop.check()
    if directory is not None:
        if recipe is None and loop.batch == Batch(loop.batch.env, starts=settings.starts):
            recipe = config.describe(agent, loop.batch.env)
        facts = environment_facts(loop.mesh)
        content = {"architecture": "anakin", "recipe": recipe and dataclasses.asdict(recipe)}
        content |= {"settings": dataclasses.asdict(settings), "num_cores": loop.num_cores, **facts}
        if or_resume and resumable(directory, content):
            return resume(directory, cores=cores, agent=agent, env=env, sinks=sinks, **own(settings))
        create_directory(directory, content, or_resume)
    state = loop.init(settings.seed)
    run = Run(agent, env, loop, settings, directory, state=state)
    return go_on(run, [ReturnWindow() for _ in range(loop.num_members)], sinks, notes)


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
    """Go on from the newest checkpoint of a run directory, bit for bit where the number of cores is the same.

    Args:
      run_dir: what `train` wrote.
      cores: another number of cores of each host; the environments are spread over all of them anew, and a replay
        begins empty.
      total_steps: another end; None keeps the run's own.
      agent, env: the objects, where the run was made from Python objects without names.
      sinks: as in `train`.
      changes: other settings from here on: `profile`, `metrics_port`.

    Raises:
      UserError: there is no checkpoint, or it does not fit.
    """
    directory = pathlib.Path(run_dir)
    changes |= {} if total_steps is None else {"total_steps": total_steps}
    check_own(changes)
    agent, env, settings = reopen(directory, "anakin", Settings(), changes, agent, env)
    checkpoints = open_checkpoints(directory, place=settings.checkpoint_dir)
    agree(settings, cores)

    def make(meta: dict[str, Any]) -> tuple[tuple[Settings, Anakin, AnakinState], dict[str, Any]]:
        """What goes on from such a checkpoint, and what is read of it."""
        found = _settings_for(settings, meta, directory, cores)
        loop = build_loop(agent, env, change(found, {"updates_per_call": meta["updates_per_call"]}), cores)
        like = loop.init(found.seed)
        return (found, loop, like), {"params": like.learner.params, "state": rest(meta, loop, like)}

    def rest(meta: dict[str, Any], loop: Anakin, like: AnakinState) -> AnakinState:
        """What is read beside the params."""
        kept = meta["num_cores"] if loop.members is None else loop.num_cores  # a member's replay goes where it goes
        return without_params(like._replace(learner=replays.left_out(like.learner, kept, loop.num_cores)))

    meta, (settings, loop, like) = checkpoints.choose(make)
    if "profile" in changes:
        profile.check(settings.profile, directory, math.ceil(settings.total_steps / loop.steps_per_update))
    params = checkpoints.params(like.learner.params)
    state = checkpoints.state(rest(meta, loop, like))
    state = state._replace(learner=replays.begun_anew(state.learner, like.learner)._replace(params=params))
    run = Run(agent, env, loop, settings, directory, state=state, steps=meta["steps"], train_s=meta["train_s"])
    scoring.restore_best(run, like.learner.params)
    windows = [ReturnWindow() for _ in meta["windows"]]
    for window, saved in zip(windows, meta["windows"], strict=True):
        window.restore(saved)
    notes = profile.missed(settings.profile, run.steps // loop.steps_per_update)
    if loop.members is None:
        notes += replays.describe_anew(agent, meta["num_cores"], loop.num_cores)
    return go_on(run, windows, sinks, notes, evaluation_due=meta["evaluation_due"])


def _settings_for(settings: Settings, meta: dict[str, Any], directory: pathlib.Path, cores: int | None) -> Settings:
    """`settings` with the environments of a checkpoint spread over these cores.

    Raises:
      UserError: the run is finished, or they do not divide.
    """
    check_unfinished(directory, settings, meta)
    if settings.seeds > 1 or settings.sweep:
        return settings
    environments = meta["batch_per_core"] * meta["num_cores"]  # of all hosts
    target = mesh.size(mesh.make(cores))
    check_divides("the number of environments", environments, "cores", target)
    return change(settings, {"batch_per_core": environments // target})
