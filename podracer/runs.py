"""What every run has, whatever the architecture: its directory, its facts, its way to stop."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from podracer import config, exits, hosts, mesh
from podracer.errors import UserError
from podracer.prometheus import Prometheus
from podracer.rollcall import differences
from podracer.saving import open_checkpoints
from podracer.scoring import ScoredRun
from podracer.sinks import JsonLines, Sink, TensorBoard, Terminal, WeightsAndBiases, drop_rows_after, import_wandb

PACKAGES = ("podracer", "jax", "jaxlib", "flax", "optax", "rlax", "orbax-checkpoint", "numpy", "gymnax", "envpool")


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


class Interruption:
    """Ctrl-C and SIGTERM as something that the loop asks for; a second Ctrl-C interrupts at once.

    With several hosts, a signal to one of them stops all, at the same point of the program: see `hosts.preempted`.
    Outside the main thread, where Python allows no handlers, it does nothing.
    """

    def __init__(self):
        self.signal: int | None = None  # which one the run stops for, once `reached` has said so
        self._got: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        # With several hosts SIGTERM is JAX's own, which tells the others of it.
        numbers = (signal.SIGINT, signal.SIGTERM) if hosts.count() == 1 else (signal.SIGINT,)
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number, frame) -> None:
        if self._got is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._got = number
        if hosts.count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def reached(self) -> bool:
        """Whether to stop now. All hosts must ask equally often, at the same points; they get the same answer."""
        if self.signal is None:
            if hosts.preempted():
                self.signal = self._got or signal.SIGTERM
            elif hosts.count() == 1:
                self.signal = self._got
        return self.signal is not None

    def leave(self, directory: pathlib.Path | None, steps: int) -> None:
        """Raise what the signal asks for, now that everything is saved; nothing without a signal."""
        if self.signal is None:
            return
        rest = f"; go on with: podracer resume {directory}" if directory is not None else ""
        text = f"stopped at {steps:,} steps{rest}"
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt(text)
        print(text, file=sys.stderr, flush=True)
        raise SystemExit(exits.PREEMPTED)


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
        _check_shared(directory)


def _check_shared(directory: pathlib.Path) -> None:
    """Refuse a directory on the first host's own disk: every host writes its part of the checkpoints."""
    deadline = time.monotonic() + 5.0  # a network's file system may show it a little later
    while not (directory / "config.json").is_file() and time.monotonic() < deadline:
        time.sleep(0.1)
    seen = hosts.gather("directory", (directory / "config.json").is_file())
    if not all(seen):
        blind = ", ".join(str(host) for host, sees in enumerate(seen) if not sees)
        raise UserError(
            f"run directory {directory} of host 0 is not there on host {blind}; expected one that all hosts share. "
            "Choose a --run on a network's file system or in a bucket."
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


def _resumable(directory: pathlib.Path, content: dict[str, Any]) -> bool:
    if not (directory / "config.json").is_file() or not open_checkpoints(directory, alone=True).steps():
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


def check_sinks(directory: pathlib.Path | None, tensorboard: bool, wandb: bool) -> None:
    """Refuse sinks that cannot work, before anything is written.

    Raises:
      UserError: wandb is not installed, or there is no directory for the files.
    """
    if directory is None and (tensorboard or wandb):
        name = "tensorboard" if tensorboard else "wandb"
        raise UserError(f"{name} is on, but there is no run directory for its files. Give a run_dir.")
    if wandb:
        import_wandb()


@contextlib.contextmanager
def open_sinks(
    run: ScoredRun, given: Sequence[Sink] | None, total_steps: int, members: int = 1
) -> Iterator[tuple[list[Sink], Callable[[str], None]]]:
    """`(sinks, note)`: the files of the run directory beside the `given` sinks, or a terminal where None are given.

    `note(text)` says a line in the terminal. All sinks are closed at the end. Of several hosts only the first has any.
    """
    if not hosts.is_first():
        yield [], lambda text: None
        return
    terminal = None
    if given is None:
        terminal = Terminal(total_steps, f"{run.agent.name} on {run.env_name}", members)
    with contextlib.ExitStack() as stack:
        sinks: list[Sink] = []
        for sink in (*(given or ()), *([terminal] if terminal else []), *_default_sinks(run)):
            stack.callback(sink.close)
            sinks.append(sink)
        yield sinks, terminal.note if terminal else lambda text: None


def _default_sinks(run: ScoredRun) -> Iterator[Sink]:
    """The files of a run directory, and what else was asked for, for a run that goes on after `run.steps`."""
    if run.settings.metrics_port is not None:
        yield Prometheus(run.settings.metrics_port, {"agent": run.agent.name, "env": run.env_name})
    if run.directory is None:
        return
    # A run that was killed has rows from after its last checkpoint: they will be written again.
    drop_rows_after(run.directory / "metrics.jsonl", run.steps)
    yield JsonLines(run.directory / "metrics.jsonl")
    if run.settings.tensorboard:
        yield TensorBoard(run.directory / "tensorboard", run.steps)
    if run.settings.wandb:
        yield WeightsAndBiases(run.directory, config.read(run.directory))


def memory_of(compiled: Any) -> str:
    """Estimated memory of a compiled program, in words."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return "an unknown amount of memory"
    used = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + analysis.output_size_in_bytes
    return f"{max(math.ceil((used - analysis.alias_size_in_bytes) / 1e6), 1):,} MB"


def environment_facts(cores: Any) -> dict[str, Any]:
    """What one must know to repeat a run: command, versions, commit, devices, date."""
    return {
        "command": [pathlib.Path(sys.argv[0]).name, *sys.argv[1:]],
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "git_commit": _git_commit(),
        "devices": mesh.describe(list(cores.devices.flat)),
        "platform": jax.default_backend(),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """The commit of the source tree this runs from, or None."""
    here = pathlib.Path(__file__).resolve().parent
    command = ["git", "-C", str(here), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
