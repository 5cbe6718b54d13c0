"""Two hosts on this machine, for parts b, c, f and h of `survival.py`: processes that only the run itself ends."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
START_S = 300.0


@dataclasses.dataclass
class Ends:
    """How hosts ended."""

    each: dict[int, tuple[int, float] | None]  # status (negative: a signal) and seconds; None: it goes on

    def status(self, host: int) -> int | None:
        end = self.each[host]
        return None if end is None else end[0]

    @property
    def latest(self) -> float:
        """Seconds to the end of the last."""
        return max(float("inf") if end is None else end[1] for end in self.each.values())

    def __str__(self) -> str:
        words = {
            h: "goes on" if end is None else f"status {end[0]} after {end[1]:.1f} s" for h, end in self.each.items()
        }
        return ", ".join(f"host {host}: {text}" for host, text in words.items())


class Pair:
    """Two hosts that run one command, each started by itself, as on a pod: `launch local` would end the survivors.

    Args:
      command: of `podracer`.
      folder: for what they say.
      hosts: which of the two are started.
      environment: more variables.
    """

    def __init__(self, command: Sequence[str], folder: pathlib.Path, hosts: Sequence[int] = (0, 1), **environment: str):
        self.address = f"127.0.0.1:{_free_port()}"
        self._outputs = {host: folder / f"output-{host}" for host in hosts}
        self._marks = dict.fromkeys(hosts, 0)
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("PODRACER_", "JAX_"))} | environment
        variables |= {"PYTHONPATH": f"{ROOT}:{HERE}", "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
        variables |= {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "xla")}
        variables |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        line = [sys.executable, "-m", "launch.cli", *command, "--coordinator", self.address, "--hosts", "2", "--host"]
        self.processes: dict[int, subprocess.Popen] = {}
        for host in hosts:
            with open(self._outputs[host], "wb") as file:
                self.processes[host] = subprocess.Popen(
                    [*line, str(host)], cwd=ROOT, env=variables, stdout=file, stderr=file, start_new_session=True
                )

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_) -> None:
        """End whatever is left."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    @property
    def runs(self) -> bool:
        """Whether both are there."""
        return all(process.poll() is None for process in self.processes.values())

    def until(self, condition: Callable[[], bool], seconds: float = START_S) -> bool:
        """Whether it came true while both were there."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.runs:
            if condition():
                return True
            time.sleep(0.02)
        return False

    def send(self, host: int, number: int) -> None:
        """A signal to one of them; nothing where it has ended."""
        self.processes[host].send_signal(number)

    def listens(self) -> bool:
        """Whether both have a handler for SIGTERM: Python itself takes a moment to start."""
        texts = [_status_of(process.pid) for process in self.processes.values()]
        return all(int(text.partition("SigCgt:")[2].split()[0], 16) >> signal.SIGTERM - 1 & 1 for text in texts if text)

    def mark(self) -> None:
        """From here on `said` means what is said after this moment."""
        self._marks = {host: path.stat().st_size for host, path in self._outputs.items()}

    def said(self, host: int) -> str:
        """What a host has said since `mark`, or since its start."""
        return self._outputs[host].read_bytes()[self._marks[host] :].decode(errors="replace")

    def ends(self, since: float, seconds: float) -> Ends:
        """Wait until all have ended, for so many seconds from now at most; `since` is a moment of `time.time`."""
        until, found = time.monotonic() + seconds, Ends(dict.fromkeys(self.processes))
        while None in found.each.values() and time.monotonic() < until:
            for host, process in self.processes.items():
                if found.each[host] is None and process.poll() is not None:
                    found.each[host] = process.returncode, time.time() - since
            time.sleep(0.01)
        return found

    def left(self) -> list[int]:
        """The hosts of which processes are there, the host itself or what it has started."""
        found = []
        for host, process in self.processes.items():
            process.poll()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 0)
                found.append(host)
        return found


def _status_of(pid: int) -> str:
    try:
        return pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
