"""What a run on Anakin is between two calls, and what a call says."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from podracer import mesh as cores
from podracer.metrics import Episodes, EpisodeSums
from podracer.types import LearnerState, TimeStep


class AnakinState(NamedTuple):
    """Everything a run is. N cores, B environments each; a leading axis M where many runs train in one program."""

    learner: LearnerState  # params, opt_state and slow replicated, memory [N, ...] sharded
    actor: Any  # [N * B, ...] what the agent carries from step to step
    env: Any  # [N * B, ...]
    timestep: TimeStep  # [N * B, ...] the last one
    episodes: Episodes  # [N * B] the running episodes' returns and lengths
    key: jax.Array  # [] the run's PRNG key; never changes, everything is folded from it
    updates: jax.Array  # [] int32 learner steps so far


SPECS = AnakinState(
    learner=LearnerState(cores.REPLICATED, cores.REPLICATED, cores.REPLICATED, cores.SHARDED),
    actor=cores.SHARDED,
    env=cores.SHARDED,
    timestep=cores.SHARDED,
    episodes=cores.SHARDED,
    key=cores.REPLICATED,
    updates=cores.REPLICATED,
)


class CallMetrics(NamedTuple):
    """What one call says: one number per update, U = updates_per_call; [M, U] with many runs."""

    learner: dict[str, jax.Array]  # [U] each, the agent's own metrics
    episodes: EpisodeSums  # [U] each, of the episodes that ended in that update
