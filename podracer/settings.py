"""Settings that a run has on every architecture; each architecture adds its own."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, Literal, TypeVar

from podracer import profile
from podracer.errors import UserError, check_number, unknown

S = TypeVar("S", bound="RunSettings")


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """Settings of a run."""

    total_steps: int = 1_000_000
    """Agent decisions to train for, over all cores (per run, where many train in one program)."""
    unroll_length: int = 32
    """Decisions per environment between two updates."""
    seed: int = 0
    """Seed of everything random."""
    evaluations: int = 10
    """Greedy evaluations during the run; each also saves a checkpoint. 0: none, and ten checkpoints."""
    eval_episodes: int = 64
    """Episodes per evaluation."""
    keep: int = 2
    """Newest checkpoints to keep, beside the best."""
    checkpoint_every_s: float = 60.0
    """Seconds between checkpoints, beside those at evaluations. 0: only there and at the end."""
    checkpoint_max_age_s: float = 3600.0
    """Where checkpoints cannot be written, the run goes on until the last good one is so old, and then stops."""
    checkpoint_dir: str | None = None
    """Where checkpoints go, a directory or a bucket (gs://...); None: in the run directory."""
    nan: Literal["stop", "skip"] = "stop"
    """What a loss that is not finite does: stop the run, or skip that update and count it."""
    tensorboard: bool = False
    """Write TensorBoard files too."""
    wandb: bool = False
    """Log to Weights & Biases too."""
    profile: str | None = None
    """Trace the updates START:STOP, counted from 1, into tensorboard/plugins/profile of the run; None: none."""
    metrics_port: int | None = None
    """Serve the newest metrics as Prometheus text on this port of 127.0.0.1; None: do not."""

    def __post_init__(self):
        for name, kind in typing.get_type_hints(type(self)).items():
            value = getattr(self, name)
            if typing.get_origin(kind) is Literal and value not in typing.get_args(kind):
                raise unknown(
                    name, str(value), typing.get_args(kind), f"Expected {' or '.join(typing.get_args(kind))}."
                )
            if kind in (int, int | None) and value is not None:
                if not float(value).is_integer():
                    raise UserError(f"{name} is {value}; expected a whole number. Change {name}.")
                object.__setattr__(self, name, int(value))  # 1e6 is a number of steps, too
        self._check_at_least(1, "total_steps", "unroll_length", "eval_episodes", "keep")
        self._check_at_least(0, "evaluations", "checkpoint_every_s", "checkpoint_max_age_s")
        check_number("seed", self.seed, minimum=0, maximum=2**32 - 1)
        check_number("metrics_port", self.metrics_port, minimum=1, maximum=65_535)
        profile.parse(self.profile)

    def _check_at_least(self, minimum: int, *names: str) -> None:
        for name in names:
            check_number(name, getattr(self, name), minimum=minimum)

    @property
    def num_stops(self) -> int:
        """How often the run stops to evaluate or save."""
        return self.evaluations or 10

    def stops(self, count: int) -> set[int]:
        """Which of `count` calls or updates are followed by an evaluation or a checkpoint; the last one always is."""
        return {round(n * count / self.num_stops) for n in range(1, self.num_stops + 1)} | {count}


def change(settings: S, changes: dict[str, Any]) -> S:
    """`settings` with some fields changed.

    Raises:
      UserError: there is no such field, or its value cannot be.
    """
    known = {field.name for field in dataclasses.fields(settings)}
    strange = sorted(set(changes) - known)
    if strange:
        raise UserError(f"unknown setting '{strange[0]}'; expected one of {', '.join(sorted(known))}.")
    return dataclasses.replace(settings, **changes)
