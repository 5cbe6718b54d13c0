"""What watches a program from a thread beside it, because the program may hang inside a compiled call.

A watchdog ends the process when nothing has moved for too long, with the stacks of all threads: another host may be
alive but stuck, which no heartbeat shows. The only threads outside `sebulba/` are started here: watchdogs, and what
serves metrics (decision 22).
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

FAREWELL_S = 5.0  # for the other hosts to hear of it
PAUSE_S = 3600.0  # how much longer than usual it may take to evaluate and to save


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
      leave: `(status, why)` ends the process and tells the other hosts why. It may itself hang, where the host that
        carries the messages is the one that stands still.
    """

    def __init__(self, timeout_s: float, leave: Callable[[int, str], object]):
        self._timeout_s, self._leave = timeout_s, leave
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
        """What happens inside may take `PAUSE_S` longer."""
        self._last = time.monotonic() + PAUSE_S
        yield
        self.beat()

    def _watch(self) -> None:
        while not self._done.wait(min(self._timeout_s / 10, 1.0)):
            last = self._last
            if last is not None and time.monotonic() - last > self._timeout_s:
                self._bite()

    def _bite(self) -> None:
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        why = f"no call has finished for {self._timeout_s:g} s (--stall-timeout)"
        print(f"podracer: {why}; the stacks of all threads are above", file=sys.stderr, flush=True)
        beside(lambda: self._tell(why), "farewell")
        time.sleep(FAREWELL_S)
        os._exit(exits.STALLED)

    def _tell(self, why: str) -> None:
        self._leave(exits.STALLED, why)
