"""A run's way to stop: Ctrl-C and SIGTERM, on one host or on several."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import threading
from typing import Any

from podracer import config, exits, hosts
from podracer.errors import UserError


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

    def leave(self, directory: pathlib.Path | None, steps: int, total_steps: int) -> None:
        """Raise what the signal asks for, now that everything is saved; nothing without a signal.

        Args:
          directory: of the run.
          steps: that were made.
          total_steps: that were to be made.
        """
        if self.signal is None:
            return
        rest = ""
        if directory is not None:
            rest = f"; go on with: podracer resume {directory}{_end(directory, total_steps)}"
        text = f"stopped at {steps:,} steps{rest}"
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt(text)
        print(text, file=sys.stderr, flush=True)
        raise SystemExit(exits.PREEMPTED)


def _end(directory: pathlib.Path, total_steps: int) -> str:
    """The flag for an end that is not the one which the run began with."""
    try:
        begun_with = config.read(directory)["settings"]["total_steps"]
    except (UserError, KeyError):  # another host has the directory
        return ""
    return "" if begun_with == total_steps else f" --total-steps {total_steps}"
