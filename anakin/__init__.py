"""Anakin: environment and learner in one compiled program, replicated over every core."""

from anakin.loop import Anakin
from anakin.members import Members
from anakin.run import Run
from anakin.settings import Settings
from anakin.state import AnakinState
from anakin.train import resume, train

__all__ = ["Anakin", "AnakinState", "Members", "Run", "Settings", "resume", "train"]
