"""What `podracer doctor` finds out about devices and memory, from the files of the system and from JAX."""

from __future__ import annotations

import json
import os
import pathlib
import platform
import subprocess
import sys
from typing import NamedTuple

JAX_TIMEOUT_S = 120.0
LOW_MEMORY_GB = 2.0
EXTRA = "pip install '.[tpu]' or '.[cuda]' in the source folder"
ROOT = pathlib.Path("/")  # another one in tests
OK, WARN, BROKEN = "ok", "warn", "broken"


class Finding(NamedTuple):
    """What a check found."""

    name: str
    state: str  # ok, warn: may get in the way, broken: training cannot work
    found: str
    do: str = ""  # what to do about it


def devices(asked: str | None) -> Finding:
    """What JAX finds, asked in a process of its own."""
    code = (
        "import jax, json; d = jax.devices(); sizes = jax.local_devices()[0].memory_stats() or {}; "
        "print(json.dumps([jax.default_backend(), len(d), d[0].device_kind, sizes.get('bytes_limit')]))"
    )
    environment = dict(os.environ) | ({"JAX_PLATFORMS": {"gpu": "cuda"}.get(asked, asked)} if asked else {})
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=JAX_TIMEOUT_S, env=environment
        )
    except subprocess.TimeoutExpired:
        do = "see the TPU above, or whether this is one host of many: start the same command on all of them"
        return Finding("devices", BROKEN, f"JAX did not start within {JAX_TIMEOUT_S:g} s", do)
    name = f"asked for {asked}" if asked else "nothing asked for"
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        do = f"install the extra for it ({EXTRA}), or ask for another platform"
        return Finding("devices", BROKEN, f"{name}; JAX: {lines[-1][:200] if lines else 'no message'}", do)
    backend, count, kind, limit = json.loads(done.stdout.splitlines()[-1])
    found = f"{name}, found {backend}: {count} x {kind}"
    if limit and backend != "cpu":
        found += f" with {limit / 1e9:.1f} GB of memory each for JAX"
    hardware = accelerators()
    if backend == "cpu" and hardware and asked != "cpu":
        do = f"install the extra for it ({EXTRA}), and set --platform to be sure"
        return Finding("devices", WARN, f"{found}; but there is {', '.join(hardware)}", do)
    return Finding("devices", OK, f"{found}; {platform.processor() or platform.machine()}, {os.cpu_count()} CPUs")


def accelerators() -> list[str]:
    """Device files of accelerators."""
    patterns = ("dev/accel*", "dev/vfio/[0-9]*", "dev/nvidia[0-9]*")
    return [f"/{path.relative_to(ROOT)}" for pattern in patterns for path in sorted(ROOT.glob(pattern))]


def tpu_in_use() -> Finding:
    """Whether another process holds the TPU, by the device files that it has open."""
    files = [path for path in accelerators() if "nvidia" not in path]
    lock = ROOT / "tmp" / "libtpu_lockfile"
    if not files and not lock.exists():
        return Finding("tpu", OK, "no TPU on this machine")
    holders = {pid: name for pid, name in _holders(files).items() if pid != os.getpid()}
    if holders:
        who = ", ".join(f"{pid} ({name})" for pid, name in holders.items())
        do = "only one process can have it: wait for that one, or end it (kill PID), then try again"
        return Finding("tpu", BROKEN, f"the TPU is in use by process {who}", do)
    if lock.exists():
        do = "if no other user trains here, it is left over: rm /tmp/libtpu_lockfile"
        return Finding("tpu", WARN, "/tmp/libtpu_lockfile is there, though no process of yours has the TPU open", do)
    return Finding("tpu", OK, f"free: {', '.join(files)}")


def _holders(files: list[str]) -> dict[int, str]:
    """By process, its name: those that have one of the files open. Of other users' processes nothing can be seen."""
    found = {}
    for folder in ROOT.glob("proc/[0-9]*/fd"):
        try:
            if any(os.readlink(entry) in files for entry in folder.iterdir()):
                found[int(folder.parent.name)] = (folder.parent / "comm").read_text().strip()
        except OSError:
            continue
    return found


def memory() -> Finding:
    """Free memory of the host."""
    try:
        lines = (ROOT / "proc" / "meminfo").read_text().splitlines()
    except OSError:
        return Finding("memory", OK, "not known on this system")
    sizes = {line.split(":")[0]: int(line.split()[1]) / 1e6 for line in lines if len(line.split()) > 1}
    free, total = sizes.get("MemAvailable", 0.0), sizes.get("MemTotal", 0.0)
    text = f"{free:.1f} GB of {total:.1f} GB are free"
    if free < LOW_MEMORY_GB:
        return Finding("memory", WARN, text, "end what is not needed, or take smaller batches")
    return Finding("memory", OK, text)
