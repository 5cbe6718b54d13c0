"""Processes that take turns: each waits, and answers `go` with one timed block (see `launch/blocks.py`).

Whatever else the machine does then strikes all of them alike.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PATIENCE_S = 60  # for a worker to end by itself
POLL_S = 1.0
Command = Sequence[str] | Sequence[Sequence[str]]  # of one process, or of several that work together


class Spread(NamedTuple):
    """Several measurements of one thing."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Iterable[float]) -> Spread:
        values = list(values)
        return Spread(statistics.median(values), min(values), max(values))


class Measured(NamedTuple):
    """One row: medians over the blocks."""

    steps_per_s: float
    spread: float  # (third quartile - first quartile) / median of the blocks' steps/s
    cores: float  # CPU seconds per second
    cpu_per_million: float  # CPU seconds per million steps
    compile_s: float
    ready_s: float  # from the start of the process to its first line: imports, compilation, the first update
    blocks: list[dict[str, Any]] = []  # what the worker answered
    flags: dict[str, str] = {}  # of XLA, JAX and libtpu, in the worker's environment

    @staticmethod
    def of(blocks: list[dict[str, Any]], ready: dict[str, Any], ready_s: float) -> Measured:
        """Of blocks, and of what the worker said when it was ready, after so many seconds."""
        speeds = [block["steps_per_s"] for block in blocks] or [float("nan")]
        quartiles = statistics.quantiles(speeds, n=4) if len(speeds) > 1 else [speeds[0]] * 3
        return Measured(
            steps_per_s=statistics.median(speeds),
            spread=(quartiles[2] - quartiles[0]) / quartiles[1],
            cores=_median([block["cpu_seconds"] / block["seconds"] for block in blocks]),
            cpu_per_million=_median([block["cpu_seconds"] / block["steps"] * 1e6 for block in blocks]),
            compile_s=ready["compile_s"],
            ready_s=ready_s,
            blocks=blocks,
            flags=ready.get("flags", {}),
        )


class Failed(NamedTuple):
    """One row that there is no number for."""

    reason: str


class Worker:
    """One process of the protocol, or several that train together. Output that is not part of it goes to log files.

    Args:
      command: of the process; a list of commands for several, which are told the same and answer together.
      freeze: between its turns the process and all that it started stand still (SIGSTOP): for workers with threads
        or processes that would go on by themselves.
    """

    def __init__(self, name: str, command: Command, log_dir: Path, freeze: bool = False):
        self.name, self.error, self.freeze = name, None, freeze
        self.blocks: dict[str, list[dict[str, Any]]] = {}  # by what was measured
        commands = [command] if isinstance(command[0], str) else command
        log_dir.mkdir(parents=True, exist_ok=True)
        stem, start = name.replace(" ", "_").replace("/", "_"), time.perf_counter()
        self._logs = [log_dir / f"{stem}{f'.{i}' if i else ''}.log" for i in range(len(commands))]
        self._processes: list[subprocess.Popen[str]] = []
        try:
            for each, log in zip(commands, self._logs, strict=True):
                self._processes.append(_start(each, log, freeze))
            self.ready = self._answer()
        except BaseException:  # Ctrl-C, say: nobody else knows them yet
            self._kill()
            raise
        self.ready_s = time.perf_counter() - start

    def _answer(self) -> dict[str, Any]:
        """What all processes say, as one; empty where one of them has ended."""
        answers = []
        for process in self._processes:
            line = self._line(process)
            if not line:
                self.error = self._obituary()
                self._kill()
                return {}
            answers.append(json.loads(line))
        if self.freeze:
            self._signal(signal.SIGSTOP)
        return together(answers)

    def _line(self, process: subprocess.Popen[str]) -> str:
        """What a process says next; empty where it has ended, or where it waits for another one that has."""
        assert process.stdout is not None
        while not select.select([process.stdout], [], [], POLL_S)[0]:
            if any(each.poll() is not None for each in self._processes):
                return ""
        return process.stdout.readline()

    def _obituary(self) -> str:
        """Which process ended, and how."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:  # one that has closed its output is about to end
            for process, log in zip(self._processes, self._logs, strict=True):
                if process.poll() is not None:
                    return f"ended with status {process.poll()}, see {log}"
            time.sleep(0.02)
        return f"says nothing any more, see {self._logs[0]}"

    def _say(self, command: str) -> None:
        for process in self._processes:
            assert process.stdin is not None
            if not process.stdin.closed:
                with contextlib.suppress(BrokenPipeError):  # it has ended; reading its answer says how
                    process.stdin.write(command + "\n")
                    process.stdin.flush()
        if self.freeze:
            self._signal(signal.SIGCONT)

    def block(self, what: str = "") -> None:
        """Run one block (of `what`, where the worker measures several things), unless the worker has failed."""
        if self.error is None:
            self._say(f"go {what}".strip())
            answer = self._answer()
            if answer:
                self.blocks.setdefault(what, []).append(answer)

    def stop(self) -> None:
        """End the processes and what they started."""
        self._say("quit")
        deadline = time.monotonic() + PATIENCE_S
        for process in self._processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                self._kill()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()

    def result(self, what: str = "") -> Measured | Failed:
        """Stop the worker; its numbers."""
        if self.error is not None:
            return Failed(self.error)
        self.stop()
        return Measured.of(self.blocks.get(what, []), self.ready, self.ready_s)

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, number) if self.freeze else process.send_signal(number)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()


def _start(command: Any, log: Path, freeze: bool) -> subprocess.Popen[str]:
    with open(log, "w") as file:
        return subprocess.Popen(
            # A group of its own can be frozen as a whole; when its parent dies, the kernel ends it, frozen or not.
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            process_group=0 if freeze else None,
        )


def together(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """One answer of processes that trained together: each counts the steps of all, and the last one to end counts."""
    first = answers[0]
    if len(answers) == 1 or "seconds" not in first:
        return first
    seconds = max(answer["seconds"] for answer in answers)
    numbers = {"seconds": seconds, "steps_per_s": first["steps"] / seconds}
    return first | numbers | {"cpu_seconds": sum(answer["cpu_seconds"] for answer in answers)}


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else float("nan")


def in_turns(
    commands: dict[str, Command],
    rounds: int,
    log_dir: Path,
    parts: dict[str, Sequence[str]] | None = None,
    freeze: bool = False,
    seldom: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Measured | Failed]:
    """Start every command's worker, one after the other, then let them take turns for `rounds` blocks each.

    Args:
      commands: by name, see `Worker`.
      parts: by worker, the things that it measures, where there are several; they are the names of its results.
      freeze: see `Worker`.
      seldom: parts whose names begin so are measured in every second round only.
      say: is told how far it is.
    """
    whats = {name: (parts or {}).get(name, ("",)) for name in commands}
    workers: list[Worker] = []
    try:
        for number, (name, command) in enumerate(commands.items(), 1):
            say(f"starting {number} of {len(commands)}: {name}")
            workers.append(Worker(name, command, log_dir, freeze))
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            for worker in workers:
                for what in whats[worker.name]:
                    if number % 2 == 0 or seldom is None or not what.startswith(seldom):
                        worker.block(what)
        return {what or worker.name: worker.result(what) for worker in workers for what in whats[worker.name]}
    finally:
        for worker in workers:
            worker.stop()


def one_at_a_time(
    commands: dict[str, Command],
    rounds: int,
    log_dir: Path,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Measured | Failed]:
    """As `in_turns`, for devices that only one process can hold: every block is by a process of its own."""
    found: dict[str, list[Worker]] = {name: [] for name in commands}
    for number in range(rounds):
        for name, command in commands.items():
            say(f"round {number + 1} of {rounds}: {name}")
            worker = Worker(name, command, log_dir / str(number + 1))
            found[name].append(worker)
            worker.block()
            worker.stop()
    results: dict[str, Measured | Failed] = {}
    for name, workers in found.items():
        errors = [worker.error for worker in workers if worker.error is not None]
        blocks = [block for worker in workers for block in worker.blocks.get("", [])]
        last = workers[-1]
        results[name] = Failed(errors[0]) if errors else Measured.of(blocks, last.ready, last.ready_s)
    return results
