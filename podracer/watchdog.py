"""What watches a program from a thread beside it, because the program may hang inside a compiled call.

A watchdog ends the process when nothing has moved for too long, with the stacks of all threads: another host may be
alive but stuck, which no heartbeat shows. These are the only threads outside `sebulba/`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from podracer import exits


def beside(function: Callable[[], None], name: str) -> None:
    """Run `function` beside the program; it ends with the process."""
    threading.Thread(target=function, name=name, daemon=True).start()


def flag() -> threading.Event:
    """What such a function may wait for."""
    return threading.Event()


class Watchdog:
    """Counts the seconds since the last beat, from the first one on.

    Args:
      timeout_s: so much silence ends the process, status 73.
    """

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        self._last: float | None = None  # None: it does not count
        self._done = flag()

    def __enter__(self) -> Watchdog:
        beside(self._watch, "watchdog")
        return self

    def __exit__(self, *_) -> None:
        self._done.set()

    def beat(self) -> None:
        """Something moved."""
        self._last = time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count what happens inside."""
        self._last = None
        yield
        self.beat()

    def _watch(self) -> None:
        while not self._done.wait(min(self._timeout_s / 10, 1.0)):
            last = self._last
            if last is not None and time.monotonic() - last > self._timeout_s:
                self._bite()

    def _bite(self) -> None:
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        print(
            f"podracer: no call has finished for {self._timeout_s:g} s (--stall-timeout); the stacks of all threads "
            "are above",
            file=sys.stderr,
            flush=True,
        )
        os._exit(exits.STALLED)
