"""Agents, one file each, all on the contract of `podracer/types.py`: the same object runs on every architecture."""

from podracer.agents.a2c import a2c
from podracer.agents.impala import impala
from podracer.agents.ppo import ppo
from podracer.agents.pqn import pqn

__all__ = ["a2c", "impala", "ppo", "pqn"]
