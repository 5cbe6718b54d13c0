"""Several hosts on this machine, as tests start them: tiny runs, and processes that end whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import jax

TINY = [
    *("--env", "catch", "--env.rows", "5", "--env.columns", "3", "--agent", "a2c", "--preset", "none"),
    *("--network.hidden", "8", "--unroll-length", "5"),
]
# 4 cores x 4 environments x 5 steps x 2 updates = 160 steps per call.
ANAKIN = ["train", "anakin", *TINY, "--batch-per-core", "4", "--updates-per-call", "2", "--eval-episodes", "8"]
SEBULBA = [
    *("train", "sebulba", *TINY, "--batch-size", "4", "--threads-per-core", "1", "--eval-episodes", "4", "--no-probe"),
]
FOR_EVER = ["--total-steps", "1000000000", "--evaluations", "0"]


def environment(**more: str) -> dict[str, str]:
    """The suite's compilation cache, quick compilation, and no host of another run."""
    found = {name: value for name, value in os.environ.items() if not name.startswith(("PODRACER_", "JAX_"))}
    found |= {"JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return found | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05", "PYTHONPATH": os.getcwd(), **more}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(line: list[object], **more: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *map(str, line)],
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@contextlib.contextmanager
def running(*processes: subprocess.Popen):
    """End them at the end."""
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


def start_each(*commands: list[object], cores: int = 2) -> list[subprocess.Popen]:
    """One host per command, by flags."""
    address, platform = f"127.0.0.1:{free_port()}", {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(cores)}
    flags = ["--coordinator", address, "--hosts", len(commands)]
    each = [["-m", "launch.cli", *command, *flags, "--host", host] for host, command in enumerate(commands)]
    return [start(line, **platform) for line in each]


def launch(*arguments: object, hosts: int = 2, cores: int = 2, path: object = "") -> subprocess.Popen:
    """`podracer launch local ARGUMENTS`; `path` is another folder that Python looks into."""
    line = ["-m", "launch.cli", "launch", "local", "--hosts", hosts, "--cores-per-host", cores, *arguments]
    return start(line, PYTHONPATH=os.pathsep.join(filter(None, [str(path), os.getcwd()])))


def end(process: subprocess.Popen, timeout_s: float = 120.0) -> tuple[int, str, str]:
    """`(status, stdout, stderr)`."""
    out, err = process.communicate(timeout=timeout_s)
    return process.returncode, out, err


def rows(directory: pathlib.Path) -> list[dict]:
    path = directory / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def wait_for_rows(directory: pathlib.Path, count: int, *processes: subprocess.Popen, timeout_s: float = 90.0) -> None:
    """Until the run has written so many rows."""
    deadline = time.monotonic() + timeout_s
    while not (directory / "metrics.jsonl").is_file() or len(rows(directory)) < count:
        for process in processes:
            assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def children(pid: int) -> list[int]:
    """The processes that `pid` has started, oldest first."""
    text = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return sorted(map(int, text.split()))


def listeners(pid: int) -> set[str]:
    """Local addresses (as /proc has them, in hexadecimal) at which the process listens."""
    sockets = set()
    for path in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(path).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                found.add(fields[1].partition(":")[0])
    return found


LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
