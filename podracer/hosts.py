"""The processes of one run, one per host. Where there is one, everything here costs nothing.

Whatever is decided from a clock, a signal or a random number of this host must be decided once for all of them, or they
leave each other waiting in a collective: `from_first`, `gather` and `preempted` are how. Only `from_first` of arrays
uses the cores; the rest goes over JAX's coordination service, from any thread.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import importlib.metadata
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np

from podracer import exits, rollcall, watchdog
from podracer.errors import UserError, check_number
from podracer.rollcall import Place

# What a launcher sets for each process that it starts.
COORDINATOR, COUNT, INDEX = "PODRACER_COORDINATOR", "PODRACER_HOSTS", "PODRACER_HOST"
HEARTBEAT_S = 30  # a host that is silent for longer is lost, and ends the others
SHUTDOWN_S = 20
ALIKE = ("podracer", "jax", "jaxlib")  # packages that must have one version on all hosts

_rounds: collections.Counter[str] = collections.Counter()  # of each name, how often `gather` was called
_polls, _sync_manager = 0, None
_watching = watchdog.flag()  # set: nobody watches the others any more
FAILED = "podracer/failed"


class PeerLost(RuntimeError):
    """Another host of this run is gone."""


def count() -> int:
    """How many hosts train together. Like all here but `from_first`, it does not start JAX's backend."""
    return _state().num_processes


def index() -> int:
    """Which of them this is, from 0."""
    return _state().process_id


def is_first() -> bool:
    """Whether this host speaks for all: it writes the metrics and talks to the terminal."""
    return index() == 0


def connect(
    coordinator: str | None = None,
    hosts: int | None = None,
    host: int | None = None,
    timeout_s: float = 300.0,
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> None:
    """Join the other hosts of this run, before anything else uses JAX; nothing where there are none.

    Args:
      coordinator: HOST:PORT of the first host. None: what a launcher's environment says, or what JAX finds out on a
        Cloud TPU, on GKE with TPUs, under Slurm and Open MPI.
      hosts: how many there are; 1 looks for no others.
      host: which of them this is, from 0.
      timeout_s: how long to wait for the others.
      say: gets a line now and then while the first host waits.

    Raises:
      UserError: hosts are missing (which), or their versions differ (which), or this process has begun to use JAX.
    """
    if jax.distributed.is_initialized():
        return
    place = _place(coordinator, hosts, host)
    if place is None or place.count == 1:
        return
    check_number("hosts-timeout", timeout_s, minimum=0, exclusive=True)
    rollcall.split(place.address)
    bound = rollcall.call(place, _versions(), timeout_s, say)
    try:
        jax.distributed.initialize(
            place.address,
            place.count,
            place.index,
            cluster_detection_method="deactivate",  # all is known
            initialization_timeout=int(max(timeout_s, 30)),
            heartbeat_timeout_seconds=HEARTBEAT_S,
            shutdown_timeout_seconds=SHUTDOWN_S,
            coordinator_bind_address=bound if place.index == 0 else None,
        )
    except RuntimeError as error:
        raise UserError(
            f"this process cannot join the others: {error}. Call connect before anything uses JAX."
        ) from None
    _take_sync_manager()
    sys.excepthook = _end_all
    _watching.clear()
    watchdog.beside(_watch, "hosts")
    atexit.register(disconnect)


def _place(coordinator: str | None, hosts: int | None, host: int | None) -> Place | None:
    """Where the hosts meet: by what was given, by the environment, or as JAX finds out; None for a single host."""
    if hosts == 1:
        return None
    given: dict[str, Any] = {"coordinator": coordinator, "hosts": hosts, "host": host}
    if all(value is None for value in given.values()):
        for name, variable in zip(given, (COORDINATOR, COUNT, INDEX)):
            given[name] = os.environ.get(variable)
        if all(value is None for value in given.values()):
            return _detected()
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise UserError(
            f"--{missing[0]} is missing; expected --coordinator HOST:PORT, --hosts N and --host I (from 0) together."
        )
    for name in ("hosts", "host"):
        try:
            given[name] = int(given[name])
        except ValueError:
            raise UserError(f"{name} is '{given[name]}'; expected a number.") from None
    check_number("hosts", given["hosts"], minimum=1)
    check_number("host", given["host"], minimum=0, maximum=given["hosts"] - 1)
    return Place(given["coordinator"], given["hosts"], given["host"])


def _detected() -> Place | None:
    """What JAX finds out, where something says that there may be several hosts.

    It is asked there only: elsewhere it would wait for a metadata server that does not exist.
    """
    several = ("SLURM_STEP_NODELIST", "TPU_WORKER_HOSTNAMES", "MEGASCALE_COORDINATOR_ADDRESS", "OMPI_MCA_orte_hnp_uri")
    if not any(os.environ.get(name) for name in several) and not _on_cloud_tpu():
        return None
    from jax._src.clusters import ClusterEnv

    try:
        address, hosts, host, _ = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, 60)
    except Exception as error:
        raise UserError(
            f"which hosts this run has could not be found out: {type(error).__name__}: {error}. "
            "Give --coordinator, --hosts and --host, or --hosts 1."
        ) from error
    if address is None or hosts is None or host is None:
        return None
    return Place(address, hosts, host)


def _on_cloud_tpu() -> bool:
    chips = os.path.isdir("/dev/vfio") or os.path.exists("/dev/accel0")
    if not chips or "cpu" in os.environ.get("JAX_PLATFORMS", "") or "TPU_SKIP_MDS_QUERY" in os.environ:
        return False
    from jax._src.cloud_tpu_init import running_in_cloud_tpu_vm

    return running_in_cloud_tpu_vm


def _versions() -> dict[str, Any]:
    return {"version of python": platform.python_version()} | {
        f"version of {name}": importlib.metadata.version(name) for name in ALIKE
    }


# What hosts say to each other


def gather(name: str, value: Any, between: Callable[[], None] = lambda: None) -> list[Any]:
    """What every host says, in the order of the hosts. All must call it, equally often for each name.

    Args:
      name: of the matter; each name belongs to one thread.
      value: JSON.
      between: called again and again while it waits; what it raises ends the waiting.

    Raises:
      PeerLost: another host is gone.
    """
    if count() == 1:
        return [value]
    number = _tell(name, value)
    values = [_hear(name, number, host, between) for host in range(count())]
    # Whoever has said something in this round has heard all of the round before.
    _forget(name, number - 1)
    return values


def to_first(name: str, value: Any) -> list[Any]:
    """What every host says, on the first one; on the others, which do not wait, their own `value` alone."""
    if count() == 1:
        return [value]
    number = _tell(name, value)
    if not is_first():
        return [value]
    values = [_hear(name, number, host, lambda: None) for host in range(count())]
    for host in range(count()):
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            _client().key_value_delete(_key(name, number, host))
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


def from_first(value: Any) -> Any:
    """What the first host says; `value` (numbers or arrays, of one shape everywhere) where there is only one.

    All hosts must call it, in the same order.
    """
    if count() == 1:
        return value
    from jax.experimental import multihost_utils

    return jax.tree.map(np.asarray, multihost_utils.broadcast_one_to_all(value))


def _state() -> Any:
    # What JAX knows of the hosts, and its service for small messages, have no public name yet.
    from jax._src import distributed

    return distributed.global_state


def _client() -> Any:
    return _state().client


def _key(name: str, number: int, host: int) -> str:
    return f"podracer/{name}/{number}/{host}"


def _tell(name: str, value: Any) -> int:
    number = _rounds[name] = _rounds[name] + 1
    _asking(lambda: _client().key_value_set(_key(name, number, index()), json.dumps(value)))
    return number


def _hear(name: str, number: int, host: int, between: Callable[[], None]) -> Any:
    while True:
        between()
        try:
            return json.loads(_asking(lambda: _client().blocking_key_value_get(_key(name, number, host), 500)))
        except TimeoutError:
            _refuse_if_left(host)


def _refuse_if_left(host: int) -> None:
    """Raise where the host has said that it ends; its heartbeat alone would show that later."""
    try:
        status = _client().key_value_try_get(_left(host))
    except jax.errors.JaxRuntimeError:
        return  # it has said nothing
    raise PeerLost(f"host {host} has left with status {status}")


def _left(host: int) -> str:
    return f"podracer/left/{host}"


def _forget(name: str, number: int) -> None:
    if number > 0:
        _asking(lambda: _client().key_value_delete(_key(name, number, index())))


def _asking(call: Callable[[], Any]) -> Any:
    """A call of the coordination service, with its errors told apart."""
    try:
        return call()
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            raise TimeoutError from error
        raise PeerLost(str(error).splitlines()[0]) from error


# How a run ends


def preempted() -> bool:
    """Whether a host was told to end (SIGTERM), and this is the moment at which all of them stop.

    All hosts must call it equally often, at the same points of the program: once one has had its signal, JAX lets them
    agree in the background on a call that none has reached yet.
    """
    global _polls
    if count() == 1:
        return False
    _take_sync_manager()
    _polls += 1
    return _sync_manager is not None and _sync_manager.reached_sync_point(_polls)


def _take_sync_manager() -> None:
    """Be the only one who asks JAX's manager: Orbax does so too, with numbers of its own, when it saves."""
    global _sync_manager
    if _sync_manager is None:
        state = _state()
        _sync_manager, state.preemption_sync_manager = state.preemption_sync_manager, None


def is_lost_peer(error: BaseException) -> bool:
    """Whether this is what one sees of another host's end: a collective or the coordination service broke off."""
    if isinstance(error, PeerLost):
        return True
    words = ("Gloo", "onnection reset", "onnection closed", "oordination", "heartbeat", "UNAVAILABLE", "Socket closed")
    several = jax.distributed.is_initialized()
    return several and isinstance(error, jax.errors.JaxRuntimeError) and any(word in str(error) for word in words)


def describe(error: BaseException) -> str:
    """An exception in one line, as Python's tracebacks end."""
    return (traceback.format_exception_only(error)[-1].strip().splitlines() or [""])[0][:300]


def _end_all(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """For a program of the user's: an exception that nobody caught ends this process at once, and so the others."""
    if issubclass(kind, KeyboardInterrupt):
        leave(exits.INTERRUPTED, "Ctrl-C")
    traceback.print_exception(kind, error, trace)
    leave(exits.PEER_LOST if is_lost_peer(error) else getattr(error, "exit_status", exits.INTERNAL), describe(error))


def leave(status: int, why: str = "") -> NoReturn:
    """End this process without waiting for the other hosts, which JAX would do for minutes, and tell them why.

    The first one leaves last: it serves the others, and they would be cut off before they have said what they see.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if status:
        with contextlib.suppress(Exception):  # only the first failure is kept
            _client().key_value_set(FAILED, f"host {index()} has failed with status {status}: {why}")
    with contextlib.suppress(Exception):
        if is_first():
            deadline = time.monotonic() + 2.0
            for host in range(1, count()):
                left_ms = max(int(1000 * (deadline - time.monotonic())), 1)
                _client().blocking_key_value_get(_left(host), left_ms)
        else:
            _client().key_value_set(_left(index()), str(status))
    os._exit(status)


def _watch() -> None:
    """Runs beside the program, which may be blocked in a collective: ends it soon after another host has failed."""
    while not _watching.wait(0.0):
        try:
            text = _client().blocking_key_value_get(FAILED, 500)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                continue
            text = f"the first host is gone: {describe(error)}"
        if _watching.wait(1.0):  # the program may see it by itself, or fail for the same reason
            return
        print(f"podracer: {text}; this one stops", file=sys.stderr, flush=True)
        leave(exits.PEER_LOST)


def disconnect() -> None:
    """Leave together with the other hosts, at the end of a run that went well on all of them."""
    global _sync_manager
    if jax.distributed.is_initialized() and count() > 1:
        _watching.set()
        time.sleep(0.6)  # until the watcher's question has come back: JAX cuts it off with an error message
        if _sync_manager is not None:
            _sync_manager.shutdown()
            _sync_manager = None
        jax.distributed.shutdown()
