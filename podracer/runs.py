"""What every run has, whatever the architecture: its directory, and its way to go on from there."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
import uuid
from typing import Any

from podracer import config, exits, hosts, manifest, prometheus
from podracer.checkpoint import place
from podracer.errors import UserError
from podracer.reporting import check_sinks
from podracer.rollcall import differences
from podracer.saving import open_checkpoints
from podracer.settings import RunSettings, S, change
from podracer.types import Agent


class NonFiniteLoss(RuntimeError):
    """A loss or gradient was NaN or infinite. The update was not taken; the checkpoints are those from before."""

    exit_status = exits.NOT_FINITE

    def __init__(self, update: int, directory: pathlib.Path | None, member: int | None = None):
        where = f" of member {member}" if member is not None else ""
        kept = f"The checkpoints in {directory} are from before it. " if directory is not None else ""
        super().__init__(
            f"the loss of update {update}{where} is not finite; training stopped. {kept}"
            "Lower the learning rate, or use --nan skip to leave such updates out."
        )
        self.update = update


def create_directory(directory: pathlib.Path, content: dict[str, Any], again: bool = False) -> None:
    """A new run directory with its `config.json`, made by the first host.

    Args:
      directory: where.
      content: of `config.json`.
      again: what a run left there that was stopped before its first checkpoint is in the way of nothing.

    Raises:
      UserError: it exists already, or cannot be made.
    """
    hosts.on_first(lambda: _create(directory, content, again))
    if hosts.count() > 1:
        apart = content["settings"].get("checkpoint_dir")
        if apart is None:
            _check_shared(directory, "run directory", "--run")
        elif manifest.is_local(apart):
            _check_shared(pathlib.Path(apart), "checkpoint_dir", "--checkpoint-dir")


def _check_shared(directory: pathlib.Path, name: str, flag: str) -> None:
    """Refuse a directory on the first host's own disk: every host writes its part of the checkpoints."""

    def leave_probe() -> str:
        probe = directory / f".shared-{uuid.uuid4().hex}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            probe.touch()
        except OSError as error:
            raise UserError(f"{name} {directory} cannot be written: {error.strerror}. Choose another {flag}.") from None
        return probe.name

    probe = directory / hosts.on_first(leave_probe)
    deadline = time.monotonic() + 5.0  # a network's file system may show it a little later
    while not probe.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    seen = hosts.gather("directory", probe.exists())
    hosts.on_first(lambda: probe.unlink(missing_ok=True))
    if not all(seen):
        blind = ", ".join(str(host) for host, sees in enumerate(seen) if not sees)
        raise UserError(
            f"{name} {directory} of host 0 is not there on host {blind}; expected one that all hosts share. "
            f"Choose a {flag} on a network's file system or in a bucket."
        )


def _create(directory: pathlib.Path, content: dict[str, Any], again: bool) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=again)
    except FileExistsError:
        raise _exists(directory) from None
    except OSError as error:
        raise UserError(f"run directory {directory} cannot be made: {error.strerror}. Choose another --run.") from None
    if again:
        (directory / "metrics.jsonl").unlink(missing_ok=True)
    config.write(directory, {"id": uuid.uuid4().hex, **content})


def check_new(directory: pathlib.Path | None) -> None:
    """Refuse a run directory that exists, before anything expensive.

    Raises:
      UserError: it exists.
    """

    def check():
        if directory is not None and directory.exists():
            raise _exists(directory)

    hosts.on_first(check)


class Finished(UserError):
    """A run that should go on has already reached its end."""


def resumable(directory: pathlib.Path, content: dict[str, Any]) -> bool:
    """Whether there is a run with a checkpoint in `directory`, that of the same `content` of `config.json`.

    Raises:
      UserError: it is another run: another agent, environment or setting (but for `total_steps`).
    """
    return hosts.on_first(lambda: _resumable(directory, content))


# Settings in which a run and its continuation may differ.
OWN = ("total_steps", "profile", "metrics_port")


def own(settings: RunSettings) -> dict[str, Any]:
    """Those of `settings`, by name."""
    return {name: getattr(settings, name) for name in OWN}


def check_own(changes: dict[str, Any]) -> None:
    """Refuse changes to what makes a run the one that it is.

    Raises:
      UserError: another setting than those of `OWN` is among them.
    """
    strange = sorted(set(changes) - set(OWN))
    if strange:
        raise UserError(f"{strange[0]} cannot change in a run; expected one of {', '.join(OWN)}. Leave it out.")


def _resumable(directory: pathlib.Path, content: dict[str, Any]) -> bool:
    if not (directory / "config.json").is_file():
        return False
    checkpoints = open_checkpoints(directory, alone=True)
    if not checkpoints.steps():
        checkpoints.check_none()  # those that cannot be read are no reason to begin anew
        return False
    there = config.read(directory)
    names = ("architecture", "recipe", "settings")
    parts: list[dict[str, Any]] = [{name: each.get(name) for name in names} for each in (there, content)]
    for part in parts:
        part["settings"] = {name: value for name, value in part["settings"].items() if name not in OWN}
    found = differences(json.loads(json.dumps(parts, default=str)), ("there", "now"))
    if found:
        raise UserError(f"{directory} is another run: {'; '.join(found[:3])}. Choose another --run, or its settings.")
    return True


def _exists(directory: pathlib.Path) -> UserError:
    return UserError(
        f"run directory {directory} exists. Choose another --run, or go on with it: podracer resume {directory}"
    )


def agree(settings: Any, cores: int | None, **more: Any) -> None:
    """Refuse hosts that were started with other settings, before anything is compiled.

    Raises:
      UserError: they differ; it names the field and the hosts.
    """
    hosts.agree({"settings": dataclasses.asdict(settings), "cores": cores, **more})


def reopen(
    directory: pathlib.Path,
    architecture: str,
    settings: S,
    changes: dict[str, Any],
    agent: Agent | None,
    env: Any,
) -> tuple[Agent, Any, S]:
    """`(agent, env, settings)` of a run that is to go on.

    Args:
      directory: what `train` wrote.
      architecture: of the run.
      settings: those that the directory's take the place of.
      changes: settings that are other ones from here on.
      agent, env: the objects, where the run was made from Python objects without names.

    Raises:
      UserError: there is no such run, or something does not fit.
    """
    content = hosts.on_first(lambda: config.read(directory, architecture))  # others may not see it
    if agent is None or env is None:
        built = config.build(config.recipe_of(content, directory))
        agent, env = agent or built[0], built[1] if env is None else env
    kept = {name: tuple(value) if isinstance(value, list) else value for name, value in content["settings"].items()}
    settings = change(change(settings, kept), changes)
    check_reports(settings, directory)
    return agent, env, settings


def check_reports(settings: RunSettings, directory: pathlib.Path | None) -> None:
    """Refuse ways to report and places to save that cannot work, before anything is written.

    Raises:
      UserError: wandb or the library for a bucket is not installed, there is no directory for files, or the port is
        taken.
    """
    if settings.checkpoint_dir is not None:
        place(settings.checkpoint_dir)
    check_sinks(directory, settings.tensorboard, settings.wandb)
    prometheus.check_port(settings.metrics_port)


def check_unfinished(directory: pathlib.Path, settings: RunSettings, meta: dict[str, Any]) -> None:
    """Refuse to go on from a checkpoint where there is nothing left to do.

    Raises:
      Finished: it is so.
    """
    done = meta["steps"] >= settings.total_steps and not meta["evaluation_due"]
    if done and not hosts.on_first(lambda: _lacks_score(directory, settings, meta["steps"])):
        raise Finished(
            f"{directory} is finished: it has {meta['steps']:,} of {settings.total_steps:,} steps. "
            "Give a larger --total-steps to go on."
        )


def _lacks_score(directory: pathlib.Path, settings: RunSettings, steps: int) -> bool:
    """Whether the run ended before its best params got their last score."""
    best = open_checkpoints(directory, "best", 1, settings.checkpoint_dir, alone=True)
    path = directory / "metrics.jsonl"
    if not settings.evaluations or not best.names() or not path.is_file():
        return False
    with path.open(errors="replace") as lines:
        return not any('"absolute_' in line and f'"steps": {steps},' in line for line in lines)
