"""The status with which a command ends: who restarts runs (a scheduler, a launcher) decides by it.

0 is a finished run, 130 one that Ctrl-C ended; the rest is below. After BSD's sysexits.h where it has a name for it.
A process that a signal ended has 128 + its number for a shell: 134 where JAX itself aborts (the coordinator is gone),
137 after kill -9.
"""

from __future__ import annotations

BAD_INPUT = 2  # something given cannot work: starting again would not help
INTERNAL = 70  # an exception that nobody expected
PEER_LOST = 71  # another host of the run is gone (its own status says why), or did not come
NOT_FINITE = 72  # the loss was NaN or infinite, and the run was to stop at that
STALLED = 73  # nothing moved for too long
PREEMPTED = 75  # SIGTERM, after the checkpoint: start again, it goes on
INTERRUPTED = 130  # Ctrl-C, after the checkpoint
ABORTED = 134  # SIGABRT


def worth_restarting(status: int) -> bool:
    """Whether the same command, started again, may well go on: not after what is done, wrong or was asked for."""
    return status in (INTERNAL, PEER_LOST, STALLED, PREEMPTED) or (status > 128 and status != INTERRUPTED)
