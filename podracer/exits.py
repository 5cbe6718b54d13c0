"""The status with which a command ends: who restarts runs (a scheduler, a launcher) decides by it.

0 is a finished run, 130 one that Ctrl-C ended; the rest is below. After BSD's sysexits.h where it has a name for it.
"""

from __future__ import annotations

BAD_INPUT = 2  # something given cannot work: starting again would not help
INTERNAL = 70  # an exception that nobody expected
PEER_LOST = 71  # another host of the run is gone; its own status says why
NOT_FINITE = 72  # the loss was NaN or infinite, and the run was to stop at that
STALLED = 73  # nothing moved for too long
PREEMPTED = 75  # SIGTERM, after the checkpoint: start again, it goes on
