"""Traces of a few updates, for XProf, TensorBoard or Perfetto: what the devices and the threads did, by phase.

Phases inside compiled programs are named by `scope`, those on the host by `phase` and `phases`. Without a trace they
cost next to nothing.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from podracer import hosts
from podracer.errors import UserError

scope = jax.named_scope  # of operations in a program
phase = jax.profiler.TraceAnnotation  # of a thread's time


def phases(name: str) -> Callable[[Callable], Callable]:
    """A decorator: calls of the function are a phase of their thread."""
    return lambda function: jax.profiler.annotate_function(function, name=name)


def parse(text: str | None) -> tuple[int, int] | None:
    """`START:STOP`, the first and the last update to trace, counted from 1.

    Raises:
      UserError: it is something else.
    """
    if text is None:
        return None
    first, colon, last = text.partition(":")
    if colon and first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last):
        return int(first), int(last)
    raise UserError(
        f"profile is '{text}'; expected START:STOP, the first and the last update to trace, such as 10:12. "
        "Change profile."
    )


def check(text: str | None, directory: pathlib.Path | None, updates: int) -> None:
    """Refuse a trace that could not be, before anything is compiled.

    Args:
      text: `START:STOP`.
      directory: of the run.
      updates: how many the run will have made at its end.

    Raises:
      UserError: there is no run directory, or the run ends before START.
    """
    wanted = parse(text)
    if wanted is None:
        return
    if directory is None:
        raise UserError("profile is on, but there is no run directory for the trace. Give a run_dir.")
    if wanted[0] > updates:
        raise UserError(
            f"profile is '{text}', but the run ends with update {updates}. Start there or before, or train longer."
        )


def missed(text: str | None, updates: int) -> list[str]:
    """What a run says that goes on after so many updates, where those to trace are among them."""
    wanted = parse(text)
    if wanted is None or updates < wanted[1]:
        return []
    return [f"nothing is traced: profile is '{text}', and the run goes on with update {updates + 1}"]


class Trace:
    """Traces the updates START to STOP of a run, and leaves out what comes before and after.

    Args:
      text: `START:STOP`; None traces nothing.
      directory: of the run; the trace goes to `tensorboard/plugins/profile/DATE` in it.
    """

    def __init__(self, text: str | None, directory: pathlib.Path | None):
        self._wanted, self._directory, self._on = parse(text), directory, False

    @contextlib.contextmanager
    def step(self, first: int, last: int) -> Iterator[None]:
        """Around the call that makes the updates `first` to `last`: a step of XProf's step table."""
        self.before(first, last)
        with jax.profiler.StepTraceAnnotation("updates", step_num=last):
            yield

    def around(self, take: Callable[[Any], bool]) -> Callable[[Any], bool]:
        """`take`, which is called with each update as it is done, with a trace of those that are wanted."""

        def taken(update: Any) -> bool:
            stop = take(update)
            self.after(update.number)
            self.before(update.number + 1, update.number + 1)
            return stop

        return taken

    def before(self, first: int, last: int) -> None:
        """Called before the updates `first` to `last` are made."""
        wanted = self._wanted
        if wanted is None or self._directory is None or self._on or last < wanted[0] or first > wanted[1]:
            return
        if not hosts.is_first():  # those of several processes on one machine would have one name
            return
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every call of a Python function would drown the phases
        jax.profiler.start_trace(self._directory / "tensorboard", profiler_options=options)
        self._on = True

    def after(self, last: int, results: Any = None) -> None:
        """Called after update `last` and what follows on it; waits for the `results` of the last one that is traced."""
        if self._on and self._wanted is not None and last >= self._wanted[1]:
            jax.block_until_ready(results)
            self.close()

    def close(self) -> None:
        """Write what there is, if a trace is on."""
        if self._on:
            self._on = False
            jax.profiler.stop_trace()


@contextlib.contextmanager
def tracing(text: str | None, directory: pathlib.Path | None) -> Iterator[Trace]:
    """A `Trace` that is closed at the end, whatever happens."""
    trace = Trace(text, directory)
    try:
        yield trace
    finally:
        trace.close()
