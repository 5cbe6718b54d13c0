"""Settings of a run on Sebulba, and the loop they ask for."""

from __future__ import annotations

import dataclasses
from typing import Any

from podracer.envs.host import on_host
from podracer.errors import check_number
from podracer.settings import RunSettings
from podracer.types import Agent
from sebulba.lag import Lag
from sebulba.loop import Sebulba
from sebulba.topology import split


@dataclasses.dataclass(frozen=True)
class Settings(RunSettings):
    """Settings of a run on Sebulba."""

    eval_episodes: int = 10
    """Whole games per evaluation."""
    actor_cores: int | None = None
    """Cores of each host that choose actions; the others learn. A single core does both. None: the fewest that leave
    as many learner cores as divide the batch."""
    threads_per_core: int = 2
    """Actor threads per actor core: while one steps its environments, another acts."""
    batch_size: int | None = None
    """Environments per actor thread; None: as many as the environment says, 64 by default."""
    lag: str = "fixed"
    """Updates between acting and learning: fixed[:K] (exactly K, 1 by default), sync (0), bounded:K (at most K)."""
    accumulate: int = 1
    """Trajectories of each actor thread that form one update."""
    learner_splits: int = 1
    """Learner steps, one after the other, that each update is cut into."""
    stall_timeout: float = 120.0
    """Seconds without a sign of life of a thread that end the run."""
    probe: bool = True
    """Measure first how fast the environments are alone, with random actions."""

    def __post_init__(self):
        super().__post_init__()
        self._check_at_least(1, "actor_cores", "threads_per_core", "batch_size", "accumulate", "learner_splits")
        check_number("stall_timeout", self.stall_timeout, minimum=0, exclusive=True)
        Lag.parse(self.lag)


def build_loop(agent: Agent, env: Any, settings: Settings, cores: int | None) -> Sebulba:
    """The loop for these settings; no thread is started yet."""
    env = on_host(env, settings.batch_size or getattr(env, "batch_size", 64))
    topology = split(cores, settings.actor_cores, settings.threads_per_core, env.batch_size)
    return Sebulba(
        agent,
        env,
        topology,
        settings.unroll_length,
        Lag.parse(settings.lag),
        settings.accumulate,
        settings.learner_splits,
        settings.seed,
        settings.stall_timeout,
    )
