"""A watchdog: ends the process when nothing has moved for too long, with the stacks of all threads.

For programs whose one thread may hang inside a compiled call: another host that is alive but stuck, say, which no
heartbeat shows. It needs a thread of its own for that, the only one outside `sebulba/`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator

from podracer import exits


class Watchdog:
    """Counts the seconds since the last beat, from the first one on.

    Args:
      timeout_s: so much silence ends the process, status 73.
    """

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        self._last: float | None = None  # None: it does not count
        self._done = threading.Event()

    def __enter__(self) -> Watchdog:
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
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
