"""Workers that wait for their turn: each answers `go` with one timed block (see `peers/README.md`)."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_S = 60  # for a worker to end by itself


class Measured(NamedTuple):
    """One row: medians over the blocks."""

    steps_per_s: float
    spread: float  # (third quartile - first quartile) / median of the blocks' steps/s
    cores: float  # CPU seconds per second
    cpu_per_million: float  # CPU seconds per million steps
    compile_s: float
    ready_s: float  # from the start of the process to its first line: imports, compilation, the first update
    blocks: list[dict] = []  # what the worker answered


class Failed(NamedTuple):
    """One row that there is no number for."""

    reason: str


class Worker:
    """A process of the protocol. Output that is not part of it goes to a log file.

    Args:
      freeze: between its turns the process and all that it started stand still (SIGSTOP): for workers with threads
        or processes that would go on by themselves.
    """

    def __init__(self, name: str, command: Sequence[str], log_dir: Path, freeze: bool = False):
        self.name, self.error, self.freeze = name, None, freeze
        self.blocks: dict[str, list[dict]] = {}  # by what was measured
        log_dir.mkdir(parents=True, exist_ok=True)
        self.log = log_dir / f"{name.replace(' ', '_').replace('/', '_')}.log"
        start = time.perf_counter()
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                # A group of its own can be frozen as a whole; when its parent dies, the kernel ends it, frozen or not.
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                process_group=0 if freeze else None,
            )
        self.ready = self._answer()
        self.ready_s = time.perf_counter() - start

    def _answer(self) -> dict:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.error = f"ended with status {self.process.wait()}, see {self.log}"
            return {}
        if self.freeze:
            os.killpg(self.process.pid, signal.SIGSTOP)
        return json.loads(line)

    def _say(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        if self.freeze:
            os.killpg(self.process.pid, signal.SIGCONT)

    def block(self, what: str = "") -> None:
        """Run one block (of `what`, where the worker measures several things), unless the worker has failed."""
        if self.error is None:
            self._say(f"go {what}".strip())
            answer = self._answer()
            if answer:
                self.blocks.setdefault(what, []).append(answer)

    def stop(self) -> None:
        """End the worker and what it started."""
        if self.process.poll() is None:
            with contextlib.suppress(BrokenPipeError):
                self._say("quit")
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL) if self.freeze else self.process.kill()
                self.process.wait()

    def result(self, what: str = "") -> Measured | Failed:
        """Stop the worker; its numbers."""
        if self.error is not None:
            return Failed(self.error)
        self.stop()
        blocks = self.blocks.get(what, [])
        speeds = [block["steps_per_s"] for block in blocks] or [float("nan")]
        quartiles = statistics.quantiles(speeds, n=4) if len(speeds) > 1 else [speeds[0]] * 3
        return Measured(
            steps_per_s=statistics.median(speeds),
            spread=(quartiles[2] - quartiles[0]) / quartiles[1],
            cores=_median([block["cpu_seconds"] / block["seconds"] for block in blocks]),
            cpu_per_million=_median([block["cpu_seconds"] / block["steps"] * 1e6 for block in blocks]),
            compile_s=self.ready["compile_s"],
            ready_s=self.ready_s,
            blocks=blocks,
        )


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else float("nan")


def in_turns(
    commands: dict[str, Sequence[str]],
    rounds: int,
    log_dir: Path,
    parts: dict[str, Sequence[str]] | None = None,
    freeze: bool = False,
    seldom: str | None = None,
) -> dict[str, Measured | Failed]:
    """Start every command's worker, one after the other, then let them take turns for `rounds` blocks each.

    Whatever else the machine does then strikes all of them alike.

    Args:
      parts: by worker, the things that it measures, where there are several; they are the names of its results.
      freeze: see `Worker`.
      seldom: parts whose names begin so are measured in every second round only.
    """
    whats = {name: (parts or {}).get(name, ("",)) for name in commands}
    workers: list[Worker] = []
    try:
        for name, command in commands.items():
            workers.append(Worker(name, command, log_dir, freeze))
        for number in range(rounds):
            for worker in workers:
                for what in whats[worker.name]:
                    if number % 2 == 0 or seldom is None or not what.startswith(seldom):
                        worker.block(what)
        return {what or worker.name: worker.result(what) for worker in workers for what in whats[worker.name]}
    finally:
        for worker in workers:
            worker.stop()


def where_and_when(command: Sequence[str]) -> str:
    """Machine, command, commit and date, for the top of a table."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run(
        [*git, "status", "--porcelain", "-uno", "--", "podracer", "anakin", "sebulba"], capture_output=True, text=True
    ).stdout.strip()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return "\n".join(
        [
            f"machine: {_processor()}, {os.cpu_count()} CPUs, load {load:.1f} before the start",
            f"command: {' '.join(command)}",
            f"commit: {commit or 'unknown'}{' with local changes' if changed else ''}",
            f"date: {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}",
        ]
    )


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
