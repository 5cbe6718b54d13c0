"""Sebulba: threads step environments on the host and act on some cores, one thread learns on the others."""

from sebulba.lag import Lag
from sebulba.loop import Sebulba
from sebulba.run import Run
from sebulba.settings import Settings
from sebulba.train import resume, train
from sebulba.update import Update

__all__ = ["Lag", "Run", "Sebulba", "Settings", "Update", "resume", "train"]
