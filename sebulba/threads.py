"""Threads that fail together: the first exception in any of them stops all, and is raised again where they are joined.

Rules that keep it from hanging: every wait polls the stop flag; every thread says what it is doing; nothing waits
without a deadline.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from podracer import exits, hosts
from podracer.errors import brief

POLL_S = 0.05
LEAVE_S = 2.0  # after an error on one of several hosts


class Stopped(Exception):
    """Raised inside a thread that waits when the run is being stopped."""


class Stalled(RuntimeError):
    """A thread has not said anything for too long."""

    exit_status = exits.STALLED


class Supervisor:
    """Starts threads, watches their heartbeats, stops them.

    Args:
      stall_timeout_s: a thread that is silent for longer is a stall.
      state: what to say of the run when there is one, beside the threads.
    """

    def __init__(self, stall_timeout_s: float = 120.0, state: Callable[[], str] = lambda: ""):
        self._state = state
        self.stopping = threading.Event()
        self._stall_timeout_s = stall_timeout_s
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._beats: dict[str, tuple[float, str]] = {}
        self._longest_silence_s = 0.0

    def start(self, name: str, function: Callable[[], None]) -> None:
        """Run `function` in a thread of that name."""

        def run():
            try:
                function()
            except Stopped:
                pass
            except BaseException as error:
                self.fail(error)
            finally:
                with self._lock:
                    self._beats.pop(name, None)

        self.beat("starting", name)
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def fail(self, error: BaseException) -> None:
        """Keep the first error and stop everything."""
        with self._lock:
            self._error = self._error or error
        self.stopping.set()

    def beat(self, doing: str, name: str | None = None, patience_s: float = 0.0) -> None:
        """This thread lives, and is doing this; it may be silent for `patience_s` longer than others."""
        name, now = name or threading.current_thread().name, time.monotonic()
        last, _ = self._beats.get(name, (now, ""))
        self._longest_silence_s = max(self._longest_silence_s, now - last)
        self._beats[name] = (now + patience_s, doing)

    @contextlib.contextmanager
    def patience(self, doing: str, seconds: float) -> Iterator[None]:
        """This thread may be silent for so many seconds longer than others while it does this."""
        self.beat(doing, patience_s=seconds)
        yield
        self.beat(f"after {doing}")

    def go_on(self, doing: str) -> None:
        """A beat of a thread that works for long.

        Raises:
          Stopped: the run is being stopped.
        """
        if self.stopping.is_set():
            raise Stopped
        self.beat(doing)

    def wait(self, condition: threading.Condition, ready: Callable[[], bool], doing: str) -> None:
        """Wait, holding `condition`, until `ready()`.

        Raises:
          Stopped: the run is being stopped.
        """
        while not ready():
            if self.stopping.is_set():
                raise Stopped
            self.beat(doing)
            condition.wait(POLL_S)

    def alive(self) -> list[str]:
        """Names of the threads that still run."""
        return [thread.name for thread in self._threads if thread.is_alive()]

    def check(self) -> None:
        """Called from the main thread, again and again: raises what went wrong.

        Raises:
          the first exception of any thread, with its own traceback; Stalled.
        """
        if self._error is not None:
            raise self._error
        now = time.monotonic()
        with self._lock:
            silent = {n: (now - t, doing) for n, (t, doing) in self._beats.items() if now - t > self._stall_timeout_s}
        if silent:
            words = "; ".join(f"{name} for {age:.0f} s while {doing}" for name, (age, doing) in sorted(silent.items()))
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
            self.stopping.set()
            raise Stalled(f"no sign of life from {words}. {self._state()} The stacks of all threads are above.")

    def join(self, last_words: Callable[[list[str]], None], hurry_s: float = 5.0, patience_s: float = 20.0) -> None:
        """Stop all threads and wait for them. One that does not end, a C++ call that hangs, takes the process along.

        A thread may finish what it is doing, an update of a large network say: it gets `hurry_s` after an error and
        `patience_s` without one (less than what a machine that is taken away leaves), or twice as long as any thread
        has ever been silent where that is more. A second Ctrl-C leaves at once.

        After an error on one of several hosts no thread gets more than 2 s: the learners of the others, with which it
        may be in a collective, hear of the error only from the end of this process.

        Args:
          last_words: gets the names of the threads that do not end, before the process does.
        """
        self.stopping.set()
        error = sys.exception() or self._error
        began, told = time.monotonic(), False
        usual_s = min(2.0 * self._longest_silence_s, self._stall_timeout_s)
        deadline_s = max(usual_s, hurry_s if error is not None else patience_s)
        if isinstance(error, Exception) and hosts.count() > 1:  # not Ctrl-C, which reaches all
            deadline_s = min(deadline_s, LEAVE_S)
        try:
            while self.alive():
                time.sleep(0.01)
                now = time.monotonic()
                if now - began > deadline_s:
                    return self._leave(error, last_words, getattr(error, "exit_status", exits.INTERNAL))
                if error is None and not told and now - began > hurry_s:
                    doing = ", ".join(f"{name} ({doing})" for name, (_, doing) in sorted(self._beats.items()))
                    print(f"stopping; waiting for {doing}. Ctrl-C again leaves at once.", file=sys.stderr, flush=True)
                    told = True
        except KeyboardInterrupt as second:
            self._leave(second, last_words, exits.INTERRUPTED)

    def _leave(self, error: BaseException | None, last_words: Callable[[list[str]], None], status: int) -> None:
        """End the process in spite of threads that do not end."""
        if error is not None and not isinstance(error, KeyboardInterrupt):
            print(f"podracer: {type(error).__name__}: {error}", file=sys.stderr)
        if not isinstance(error, Stalled | KeyboardInterrupt):
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
        try:
            last_words(self.alive())
        finally:
            print(f"threads {', '.join(self.alive())} do not end; leaving without them", file=sys.stderr, flush=True)
            if hosts.count() > 1:
                hosts.leave(status, "it was stopped" if error is None else brief(error))
            os._exit(status)
