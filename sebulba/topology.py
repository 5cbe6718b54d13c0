"""Which cores act and which learn."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from podracer import hosts, mesh
from podracer.errors import UserError, check_divides, check_number


@dataclasses.dataclass(frozen=True)
class Topology:
    """The split of the cores, the same on every host.

    Attributes:
      actor_cores: devices of this host that choose actions.
      learner_mesh: a mesh over the devices that learn, of all hosts.
      threads_per_core: actor threads that take turns on each actor core.
    """

    actor_cores: tuple[Any, ...]
    learner_mesh: Any
    threads_per_core: int

    @property
    def num_threads(self) -> int:
        return len(self.actor_cores) * self.threads_per_core

    @property
    def learner_cores(self) -> tuple[Any, ...]:
        """Those of this host."""
        return tuple(mesh.local(self.learner_mesh))

    @property
    def num_cores(self) -> int:
        """Of all hosts."""
        return len(set(self.actor_cores) | set(self.learner_cores)) * hosts.count()

    @property
    def shared(self) -> bool:
        """One device both acts and learns."""
        return bool(set(self.actor_cores) & set(self.learner_cores))

    def describe(self, batch_size: int, unroll_length: int, frame_skip: int) -> str:
        """The map in words."""
        frames = self.num_threads * batch_size * unroll_length * frame_skip
        act, learn = ([str(device) for device in devices] for devices in (self.actor_cores, self.learner_cores))
        each = f" and host, {hosts.count()} hosts" if hosts.count() > 1 else ""
        both = " (the same core does both)" if self.shared else ""
        return (
            f"acting on {', '.join(act)}; learning on {', '.join(learn)}{both}; "
            f"{self.num_threads} actor thread{'s' if self.num_threads > 1 else ''} x {batch_size} environments, "
            f"unroll {unroll_length}: {frames:,} frames per update{each}"
        )


def num_acting(cores: int, wanted: int | None, batch_size: int) -> int:
    """How many of a host's `cores` act: as `wanted`, or the fewest that leave as many to learn as divide the batch."""
    if wanted is not None:
        return wanted
    return next((acting for acting in range(1, cores) if batch_size % (cores - acting) == 0), 1)


def split(num_cores: int | None, actor_cores: int | None, threads_per_core: int, batch_size: int) -> Topology:
    """The first `actor_cores` of each host's devices act, the others learn; a single device does both.

    Args:
      num_cores: of each host; None: all there are.
      actor_cores: see `num_acting`.
      threads_per_core: actor threads of each actor core.
      batch_size: environments of each thread.

    Raises:
      UserError: no core is left to learn, or the batch does not divide over the learner cores.
    """
    for name, value in {"actor_cores": actor_cores, "threads_per_core": threads_per_core}.items():
        check_number(name, value, minimum=1)
    mesh.start_backend(cores=num_cores)
    per_host = mesh.by_host(jax.devices())
    devices = per_host[hosts.index()]
    if num_cores is not None:
        if num_cores > len(devices):
            raise UserError(f"cores is {num_cores}; this host has {len(devices)}. Choose at most that many.")
        devices = devices[:num_cores]
    actor_cores = num_acting(len(devices), actor_cores, batch_size)
    # Which of a host's devices act and learn, by their place there.
    if len(devices) == 1:
        acting = learning = slice(0, 1)
    elif actor_cores >= len(devices):
        raise UserError(
            f"actor_cores is {actor_cores} of {len(devices)} cores; expected at least one core left to learn. "
            f"Choose --actor-cores 1 to {len(devices) - 1}."
        )
    else:
        acting, learning = slice(0, actor_cores), slice(actor_cores, len(devices))
    check_divides("batch_size", batch_size, "learner cores", len(devices[learning]))
    learners = [device for each in per_host for device in each[learning]]
    return Topology(tuple(devices[acting]), mesh.over(learners), threads_per_core)
