"""Sebulba: threads step environments on the host and act on some cores, one thread learns on the others."""

from sebulba.loop import Lag, Sebulba, Update
from sebulba.settings import Settings
from sebulba.train import Run, resume, train

__all__ = ["Lag", "Run", "Sebulba", "Settings", "Update", "resume", "train"]
