"""`podracer launch local`: the very program that runs on several hosts, as several processes on this machine."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

from launch.launching import repeatable, split, with_directory
from launch.parse import parse
from podracer import exits
from podracer.errors import UserError, check_number

POLL_S = 0.05
GRACE_S = 3.0  # for the others to see that one is gone, and say so
PATIENCE_S = 60.0  # where all stop together, and save
TAIL = 60  # lines of a failed host that are shown
# The fate of a host whose peer failed: never the cause, where another host has a better one. A host that waits for one
# that has failed may call it a stall before it hears of the failure.
CONSEQUENCES = ((exits.STALLED,), (exits.PEER_LOST, exits.ABORTED))


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `launch local`."""

    hosts: int = 2
    """How many hosts: processes."""
    cores_per_host: int | None = None
    """Virtual CPU cores of each; None: the machine's CPUs, shared out."""
    max_restarts: int = 0
    """How often to start again after a host has failed or was told to end; the run goes on from its checkpoint."""
    pin: bool = False
    """Give each host one physical CPU core to itself, for measurements."""

    def check(self) -> None:
        """Refuse numbers that cannot be."""
        for name, minimum in {"hosts": 1, "cores_per_host": 1, "max_restarts": 0}.items():
            check_number(f"--{name.replace('_', '-')}", getattr(self, name), minimum=minimum)


def main(arguments: list[str]) -> None:
    """`podracer launch local [OPTIONS] -- COMMAND`; exits with the status of the host that failed first."""
    own, command = split(arguments, "local")
    text = "Start a command on several hosts that are processes of this machine."
    options = parse(Options, own, "podracer launch local", text)
    options.check()
    command = with_directory(command)
    cpus = _physical_cpus()
    if options.pin and options.hosts > len(cpus):
        raise UserError(f"--pin gives each of {options.hosts} hosts a core; this machine has {len(cpus)}. Start fewer.")
    with _signals() as got:
        for restart in range(options.max_restarts + 1):
            status = _attempt(options, command, cpus, got)
            if got or not exits.worth_restarting(status) or restart == options.max_restarts:
                break
            command = repeatable(command)
            _say(f"restart {restart + 1} of {options.max_restarts} (the status was {status})")
    sys.exit(status)


@dataclasses.dataclass
class Host:
    """A host's process, and what it said where it is not shown."""

    index: int
    process: subprocess.Popen
    output: IO[bytes] | None
    ended: float | None = None  # when

    @property
    def status(self) -> int | None:
        """As a shell has it: 128 + the signal that ended it."""
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code


def _attempt(options: Options, command: list[str], cpus: list[int], got: list[int]) -> int:
    """All hosts once, from their start to the end of the last; the status that counts."""
    hosts: list[Host] = []
    try:
        address = f"127.0.0.1:{_free_port()}"
        for index in range(options.hosts):
            hosts.append(_start(options, command, address, index, cpus))
        killed = _wait(hosts, got)
    finally:
        for host in hosts:
            _kill(host)
    cause = _cause([host for host in hosts if host.index not in killed] or hosts)
    if cause is None:
        return 0
    if cause.output is not None and cause.status not in (exits.PREEMPTED, exits.INTERRUPTED):
        _show(cause)
    assert cause.status is not None
    if cause.status > 128 and cause.status != exits.INTERRUPTED:
        name = signal.Signals(cause.status - 128).name
        _say(f"host {cause.index} was ended by {name}")
    return cause.status


def _start(options: Options, command: list[str], address: str, index: int, cpus: list[int]) -> Host:
    cores = options.cores_per_host or (1 if options.pin else max((os.cpu_count() or 1) // options.hosts, 1))
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(cores)}
    environment |= {"PODRACER_COORDINATOR": address, "PODRACER_HOSTS": str(options.hosts), "PODRACER_HOST": str(index)}
    libc, launcher, mine = ctypes.CDLL(None), os.getpid(), {cpus[index]} if options.pin else None

    def prepare():  # in the new process
        if hasattr(libc, "prctl"):
            libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it dies with the launcher, however that ends
        if os.getppid() != launcher:
            os._exit(exits.INTERRUPTED)
        if mine is not None:
            os.sched_setaffinity(0, mine)

    output = tempfile.TemporaryFile() if index else None  # noqa: SIM115 (closed by _kill)
    process = subprocess.Popen(
        [sys.executable, "-m", "launch.cli", *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output and subprocess.STDOUT,
        start_new_session=True,  # a Ctrl-C in the terminal comes to the launcher alone, which passes it on
        preexec_fn=prepare,
    )
    return Host(index, process, output)


def _wait(hosts: list[Host], got: list[int]) -> set[int]:
    """Until all hosts have ended; those that do not, after another has failed, are ended (returned)."""
    deadline, passed, killed = None, 0, set()
    while any(host.status is None for host in hosts):
        for host in hosts:
            if host.ended is None and host.status is not None:
                host.ended = time.monotonic()
                if host.status and deadline is None:
                    together = host.status in (exits.PREEMPTED, exits.INTERRUPTED)
                    deadline = host.ended + (PATIENCE_S if together else GRACE_S)
        for number in got[passed:]:
            passed += 1
            for host in hosts:
                if host.status is None:
                    host.process.send_signal(number)
            deadline = min(deadline or float("inf"), time.monotonic() + (PATIENCE_S if passed == 1 else GRACE_S))
        if deadline is not None and time.monotonic() > deadline:
            killed |= {host.index for host in hosts if host.status is None}
            for host in hosts:
                _kill(host)
        time.sleep(POLL_S)
    return killed


def _cause(hosts: list[Host]) -> Host | None:
    """The host whose failure made the others fail."""
    failed = [host for host in hosts if host.status]
    rank = lambda host: next((n for n, statuses in enumerate(CONSEQUENCES, 1) if host.status in statuses), 0)
    best = min(map(rank, failed), default=0)
    causes = [host for host in failed if rank(host) == best]
    first = min(causes, key=lambda host: (host.ended or float("inf"), host.index), default=None)
    # What all of them say, as of a bad setting, has been shown already.
    shown = [host for host in causes if host.index == 0 and first is not None and host.status == first.status]
    return shown[0] if shown else first


def _show(host: Host) -> None:
    """The end of what a host said."""
    assert host.output is not None
    host.output.seek(0)
    lines = host.output.read().decode(errors="replace").splitlines()
    for line in lines[-TAIL:]:
        print(f"host {host.index}: {line}", file=sys.stderr)
    sys.stderr.flush()


def _kill(host: Host) -> None:
    """End the process, and what it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(host.process.pid, signal.SIGKILL)
    host.process.wait()


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """The signals that came, of those that the hosts get too."""
    got: list[int] = []
    handle: Callable[[int, Any], None] = lambda number, frame: got.append(number)
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield got
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _physical_cpus() -> list[int]:
    """One CPU of each physical core that this process may use."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    first: dict[str, int] = {}
    for cpu in usable:
        try:
            with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as file:
                first.setdefault(file.read().strip(), cpu)
        except OSError:
            return usable
    return list(first.values())


def _say(text: str) -> None:
    print(f"podracer launch: {text}", file=sys.stderr, flush=True)
