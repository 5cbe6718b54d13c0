"""An exception that comes out of nowhere: not from a file that `podracer` was given, so that a restart is worth it."""

import signal

TEXT = "the exception of this benchmark"


def listen() -> None:
    """From now on SIGUSR1 raises."""
    signal.signal(signal.SIGUSR1, _raise)


def _raise(number, frame):
    raise RuntimeError(TEXT)
