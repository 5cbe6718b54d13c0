"""Anakin: environment and learner in one compiled program, replicated over every core."""

from anakin.loop import Anakin, AnakinState, Members
from anakin.settings import Settings
from anakin.train import Run, resume, train

__all__ = ["Anakin", "AnakinState", "Members", "Run", "Settings", "resume", "train"]
