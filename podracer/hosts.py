"""The processes of one run, one per host. Where there is one, everything here costs nothing.

Whatever is decided from a clock, a signal or a random number of this host must be decided once for all of them, or they
leave each other waiting in a collective: `from_first`, `gather` and `preempted` are how. All of it goes over JAX's
coordination service, from any thread, and none of it over the cores: only the programs of a run meet there. A second
program of collectives beside them has no order among theirs on a CPU, where XLA runs each device's share when it
comes to it, and Gloo then takes one sum's numbers for another's (decision 20).
"""

from __future__ import annotations

import atexit
import importlib.metadata
import json
import platform
import sys
from collections.abc import Callable
from typing import Any

import jax

from podracer import endings, places, rollcall, service
from podracer.endings import disconnect, is_lost_peer, leave, preempted, why_lost
from podracer.errors import UserError, brief, check_number
from podracer.service import PeerLost

__all__ = [
    "PeerLost",
    "agree",
    "connect",
    "count",
    "disconnect",
    "from_first",
    "gather",
    "index",
    "is_first",
    "is_lost_peer",
    "leave",
    "on_first",
    "preempted",
    "to_first",
    "why_lost",
]

HEARTBEAT_S = 30  # a host that is silent for longer is lost, and ends the others
SHUTDOWN_S = 20
# Packages that must have one version on all hosts, or be on none: what is compiled, learned, saved and played.
ALIKE = ("podracer", "jax", "jaxlib", "libtpu", "flax", "optax", "rlax", "orbax-checkpoint", "envpool")


def count() -> int:
    """How many hosts train together. Like all here, it does not start JAX's backend."""
    return service.state().num_processes


def index() -> int:
    """Which of them this is, from 0."""
    return service.state().process_id


def is_first() -> bool:
    """Whether this host speaks for all: it writes the metrics and talks to the terminal."""
    return index() == 0


def connect(
    coordinator: str | None = None,
    hosts: int | None = None,
    host: int | None = None,
    timeout_s: float = 300.0,
    heartbeat_s: int = HEARTBEAT_S,
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> None:
    """Join the other hosts of this run, before anything else uses JAX; nothing where there are none.

    Args:
      coordinator: HOST:PORT of the first host. None: what a launcher's environment says, or what JAX finds out on a
        Cloud TPU, on GKE with TPUs, under Slurm and Open MPI.
      hosts: how many there are; 1 looks for no others.
      host: which of them this is, from 0.
      timeout_s: how long to wait for the others.
      heartbeat_s: a host that is silent for longer is lost; longer for one that is stopped on purpose now and then.
      say: gets a line now and then while the first host waits.

    Raises:
      HostsMissing: a UserError: some did not come (which).
      UserError: their versions differ (which), or this process has begun to use JAX.
    """
    if jax.distributed.is_initialized():
        return
    place = places.find(coordinator, hosts, host)
    if place is None:
        return
    check_number("hosts-timeout", timeout_s, minimum=0, exclusive=True)
    roll = rollcall.call(place, _versions(), timeout_s, say)
    if place.index > 0:
        rollcall.await_service(place)
    try:
        jax.distributed.initialize(
            place.address,
            place.count,
            place.index,
            cluster_detection_method="deactivate",  # all is known
            initialization_timeout=int(max(timeout_s, 30)),
            heartbeat_timeout_seconds=heartbeat_s,
            shutdown_timeout_seconds=SHUTDOWN_S,
            coordinator_bind_address=roll.bind if place.index == 0 else None,
        )
    except jax.errors.JaxRuntimeError as error:  # one was here, and has gone
        raise rollcall.HostsMissing(f"the hosts met, but do not connect: {brief(error)}. Start all again.") from None
    except RuntimeError as error:
        raise UserError(
            f"this process cannot join the others: {error}. Call connect before anything uses JAX."
        ) from None
    endings.prepare(roll.lines)
    atexit.register(disconnect)


def _versions() -> dict[str, Any]:
    return {"version of python": platform.python_version()} | {f"version of {name}": _version(name) for name in ALIKE}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


# What hosts say to each other


def gather(name: str, value: Any, between: Callable[[], None] = lambda: None) -> list[Any]:
    """What every host says, in the order of the hosts. All must call it, equally often for each name.

    The first host hears all and tells them together: two questions per host, and not one for each pair of hosts.

    Args:
      name: of the matter; each name belongs to one thread.
      value: JSON.
      between: called again and again while it waits; what it raises ends the waiting.

    Raises:
      PeerLost: another host is gone.
    """
    if count() == 1:
        return [value]
    values = to_first(name, value, between)
    number = service.next_number(everyone := f"{name}/everyone")
    if not is_first():
        return service.hear(everyone, number, 0, between)
    service.tell(everyone, number, values)
    if number > 1:  # whoever has said something in this round has heard all of the round before
        service.forget(everyone, number - 1, 0)
    return values


def to_first(name: str, value: Any, between: Callable[[], None] = lambda: None) -> list[Any]:
    """What every host says, on the first one; on the others, which do not wait, their own `value` alone."""
    if count() == 1:
        return [value]
    number = service.next_number(name)
    if not is_first():
        service.tell(name, number, value)
        return [value]
    others = range(1, count())
    values = [value, *(service.hear(name, number, host, between) for host in others)]
    for host in others:
        service.forget(name, number, host)
    return values


def agree(facts: dict[str, Any]) -> None:
    """Compare `facts` (JSON, nested dicts) over all hosts.

    Raises:
      UserError: they differ; it names the field, its values and the hosts, and is raised on all of them.
    """
    plain = json.loads(json.dumps(facts, default=str))
    problem = rollcall.disagreement(gather("facts", plain))
    if problem:
        raise UserError(problem)


def on_first(function: Callable[[], Any]) -> Any:
    """Call `function` on the first host only; what it returns (JSON) or refuses (a UserError) holds for all."""
    if count() == 1:
        return function()
    said: dict[str, Any] = {}
    if is_first():
        try:
            said = {"value": function()}
        except UserError as error:
            said = {"refused": str(error)}
    said = gather("first", said)[0]
    if "refused" in said:
        raise UserError(said["refused"])
    return said["value"]


def from_first(name: str, value: Any) -> Any:
    """What the first host says (JSON); all must call it, equally often for each name."""
    return gather(name, value)[0]
