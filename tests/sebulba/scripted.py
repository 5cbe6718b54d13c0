"""A host environment that does what a script says, and fails where it is told to."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np

from podracer.envs import api
from podracer.envs.host import HostStep, ResetTracker

OPEN: set[int] = set()  # ids of batches that are started and not closed


@dataclasses.dataclass(frozen=True)
class Scripted:
    """Episodes of 5 steps; the reward of each step is the seed's last digit. Observation: [seed digit, step]."""

    batch_size: int = 8
    fail_at: int | None = None
    delay_s: float = 0.0
    length: int = 5

    @property
    def spec(self) -> api.Spec:
        return api.Spec("scripted", api.Array((2,)), api.Discrete(2), truncates=True, max_episode_steps=self.length)

    def start(self, seeds) -> Any:
        return ScriptedBatch(self, seeds)


class ScriptedBatch:
    """The running batch."""

    def __init__(self, recipe: Scripted, seeds):
        self._recipe, self._steps, self._total = recipe, np.zeros(len(seeds), np.int64), 0
        self._digit = np.asarray(seeds, np.int64) % 10
        self._tracker = ResetTracker(len(seeds))
        self._restart = np.zeros(len(seeds), bool)
        OPEN.add(id(self))

    def reset(self) -> HostStep:
        zeros = np.zeros(len(self._steps), np.float32)
        return HostStep(self._tracker.first(self._observe()), zeros, zeros > 0)

    def step(self, action) -> HostStep:
        self._total += 1
        time.sleep(self._recipe.delay_s)
        if self._recipe.fail_at is not None and self._total >= self._recipe.fail_at:
            raise ValueError("the scripted environment fails here")
        self._steps = np.where(self._restart, 0, self._steps + 1)
        truncated = (self._steps >= self._recipe.length) & ~self._restart
        reward = self._digit.astype(np.float32)
        timestep = self._tracker.add(self._observe(), reward, np.zeros_like(truncated), truncated)
        self._restart = truncated
        return HostStep(timestep, np.where(timestep.valid, reward, 0).astype(np.float32), truncated)

    def close(self) -> None:
        OPEN.discard(id(self))

    def _observe(self) -> np.ndarray:
        return np.stack([self._digit / 10, self._steps / 5], -1).astype(np.float32)
