"""What the learner says after each update."""

from __future__ import annotations

from typing import NamedTuple

from sebulba.actor import Episode


class Update(NamedTuple):
    """What the learner says after each update."""

    number: int  # updates so far
    steps: int  # decisions learned from so far, over all hosts
    acted: int  # decisions of this run's actor threads so far, on this host; those on their way or dropped included
    metrics: dict[str, float]  # means over the learner steps of this update
    episodes: list[Episode]
    lags: list[int]  # of the trajectories consumed
    dropped: int  # trajectories too old, so far
    waits: dict[str, float]  # seconds: the actors' (mean over threads) and the learner's
