"""Where the numbers of a run go: the terminal, `metrics.jsonl`, TensorBoard, Weights & Biases.

A row is a flat dict of plain numbers. What has no value yet (a return before the first episode ended) is absent, not 0.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from podracer.errors import UserError

Row = dict[str, Any]


class Sink(Protocol):
    """Something that takes rows."""

    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """Appends each row to `metrics.jsonl`, at once, so that a killed run keeps its rows.

    A row that cannot be written (a full disk) is lost, and said to be: training is worth more than its record. It
    leaves no half of a line.
    """

    def __init__(self, path: pathlib.Path):
        self._path, self._lost = path, 0
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by close)
        self._whole = os.fstat(self._file.fileno()).st_size

    def write(self, row: Row) -> None:
        finite = {k: v for k, v in row.items() if not isinstance(v, float) or math.isfinite(v)}
        line = (json.dumps(finite) + "\n").encode()
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._whole += len(line)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._whole)
            self._lost += 1
            if self._lost & (self._lost - 1) == 0:  # 1, 2, 4, 8, ...
                self._say(f"{error.strerror}; training goes on")

    def close(self) -> None:
        if self._lost:
            self._say("the other rows are whole")
        self._file.close()

    def _say(self, text: str) -> None:
        rows = f"{self._lost} row{'s' if self._lost > 1 else ''}"
        print(f"podracer: warning: {rows} of {self._path} could not be written: {text}", file=sys.stderr, flush=True)


def drop_rows_after(path: pathlib.Path, steps: int) -> None:
    """Leave out rows of `metrics.jsonl` after `steps`, and what a killed run left half written."""
    if not path.is_file():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith(b"\n") and _steps_of(line) <= steps]
    if kept == lines[: len(kept)]:
        os.truncate(path, sum(map(len, kept)))  # which a full disk allows, too
        return
    beside = path.with_suffix(".new")
    beside.write_bytes(b"".join(kept))
    beside.replace(path)


def _steps_of(line: bytes) -> float:
    try:
        return json.loads(line)["steps"]
    except (ValueError, TypeError, KeyError):
        return math.inf


class TensorBoard:
    """Scalars over steps; many runs in one program appear as one curve per member.

    Args:
      directory: where its files go.
      steps: what was written after them before is hidden, by a run that goes on from there.
    """

    def __init__(self, directory: pathlib.Path, steps: int = 0):
        from tensorboardX import SummaryWriter

        self._directory, self._make, self._writers = directory, SummaryWriter, {}
        self._purge_step = steps + 1 if steps else None

    def write(self, row: Row) -> None:
        member = row.get("member")
        if member not in self._writers:
            name = "." if member is None else f"member-{member:03d}"
            self._writers[member] = self._make(str(self._directory / name), purge_step=self._purge_step)
        for name, value in row.items():
            if name not in ("steps", "member") and isinstance(value, int | float) and math.isfinite(value):
                self._writers[member].add_scalar(name, value, row["steps"])

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


def import_wandb() -> Any:
    """The wandb module.

    Raises:
      UserError: it is not installed.
    """
    try:
        import wandb  # type: ignore
    except ImportError as error:
        do = "pip install '.[wandb]' in the source folder."
        raise UserError(f"wandb is not installed; expected it for --wandb. {do}") from error
    return wandb


class WeightsAndBiases:
    """One W&B run per training run.

    Raises:
      UserError: wandb is not installed.
    """

    def __init__(self, directory: pathlib.Path, config: dict[str, Any]):
        wandb = import_wandb()
        self._run = wandb.init(project="podracer", name=directory.name, dir=str(directory), config=config)

    def write(self, row: Row) -> None:
        member = row.get("member")
        prefix = "" if member is None else f"member-{member:03d}/"
        self._run.log({prefix + name: value for name, value in row.items() if name != "member"}, step=row["steps"])

    def close(self) -> None:
        self._run.finish()


class Alarms:
    """Says a line the first time that a metric is greater than is good.

    Args:
      limits: `{metric: (greatest good value, what to say)}`.
      say: gets the line.
    """

    def __init__(self, limits: Mapping[str, tuple[float, str]], say: Callable[[str], None]):
        self._limits, self._say = dict(limits), say

    def write(self, row: Row) -> None:
        for name in [name for name, (limit, _) in self._limits.items() if row.get(name, 0.0) > limit]:
            _, text = self._limits.pop(name)
            self._say(f"podracer: {text}")

    def close(self) -> None:
        pass


class Terminal:
    """A live bar in a terminal; a plain line every few seconds elsewhere.

    Args:
      total_steps: where the bar ends.
      label: what is trained.
      members: how many runs train at once; their rows become one line.
      every_s: how often a plain line is printed.
    """

    def __init__(self, total_steps: int, label: str, members: int = 1, every_s: float = 5.0):
        self._total, self._label, self._members, self._every_s = total_steps, label, members, every_s
        self._last, self._progress, self._returns = -math.inf, None, {}
        if sys.stderr.isatty():
            from rich import console, progress

            self._progress = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(bar_width=24),
                progress.TextColumn("{task.percentage:>3.0f}%"),
                progress.TextColumn("{task.fields[numbers]}"),
                progress.TimeRemainingColumn(compact=True),
                console=console.Console(stderr=True),
            )
            self._task = self._progress.add_task(label, total=total_steps, numbers="compiling")
            self._progress.start()

    def note(self, text: str) -> None:
        """A line of text that stays."""
        if self._progress is not None:
            self._progress.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def write(self, row: Row) -> None:
        if "steps_per_s" not in row:
            return  # an evaluation: it does not move the bar
        member = row.get("member", 0)
        if "return_mean" in row:
            self._returns[member] = row["return_mean"]
        if member < self._members - 1:
            return  # the last one's row completes the line
        numbers = f"{_short(row['steps'])} steps  {_short(row['steps_per_s'])} steps/s"
        if row.get("frames_per_s", row["steps_per_s"]) != row["steps_per_s"]:
            numbers += f"  {_short(row['frames_per_s'])} frames/s"
        if self._returns:
            numbers += f"  return {sum(self._returns.values()) / len(self._returns):.2f}"
            numbers += f" (mean of {len(self._returns)} runs)" if len(self._returns) > 1 else ""
        if self._progress is not None:
            self._progress.update(self._task, completed=row["steps"], numbers=numbers)
        elif time.monotonic() - self._last > self._every_s or row["steps"] >= self._total:
            self._last = time.monotonic()
            left = (self._total - row["steps"]) * self._members / row["steps_per_s"]
            numbers += f"  {left:.0f} s left" if left >= 1 else ""
            print(f"{self._label}  {100 * row['steps'] / self._total:3.0f}%  {numbers}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


def _short(number: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"
