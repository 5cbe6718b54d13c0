"""An exception that comes out of nowhere: not from a file that `podracer` was given, so that a restart is worth it."""

import signal
import sys

TEXT = "the exception of this benchmark"
LATER_S = 0.01


def listen() -> None:
    """From now on SIGUSR1 raises."""
    for number in (signal.SIGUSR1, signal.SIGALRM):
        signal.signal(number, _raise)


def _raise(number, frame):
    saving = sys.modules["podracer.saving"].__file__
    while frame is not None:
        if frame.f_code.co_filename == saving:  # what is raised there is a checkpoint that could not be written
            signal.setitimer(signal.ITIMER_REAL, LATER_S)
            return
        frame = frame.f_back
    raise RuntimeError(TEXT)
