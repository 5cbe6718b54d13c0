"""`podracer doctor`: what this machine has, what is missing or in the way, and what to do about each.

Nothing here starts JAX in this process: a TPU that another process holds can make that hang.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Literal

from launch.hardware import BROKEN, OK, WARN, Finding, devices, memory, tpu_in_use
from launch.parse import parse

NEEDED = ("jax", "jaxlib", "flax", "optax", "chex", "rlax", "mctx", "numpy", "orbax-checkpoint", "tyro", "gymnax")
PORTS = {8476: "jax.distributed as podracer launch starts it", 8482: "jax.distributed on a TPU by default"}
LOW_DISK_GB = 5.0
GAME_TIMEOUT_S = 60.0
GAME = """
import sys
sys.path.insert(0, sys.argv[1])
import dataclasses
import numpy as np
from podracer import envs
from podracer.errors import UserError
try:
    batch = dataclasses.replace(envs.make("atari/Pong"), batch_size=1, num_threads=1).start([0])
    batch.reset()
    for _ in range(10):
        batch.step(np.zeros(1, np.int32))
    batch.close()
except UserError as error:
    sys.exit(str(error))
"""


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `doctor`."""

    platform: Literal["cpu", "gpu", "tpu"] | None = None
    """What must be there; None takes JAX_PLATFORMS, or what JAX finds."""
    json: bool = False
    """Print JSON."""


def main(arguments: list[str]) -> None:
    """Run all checks and print them; exit status 1 if something needed is broken."""
    text = "What this machine has, what is missing or in the way, and what to do about it."
    options = parse(Options, arguments, "podracer doctor", text)
    findings = examine(options.platform)
    if options.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        for finding in findings:
            print(f"{finding.state:<7} {finding.name:<14} {finding.found}")
            if finding.do:
                print(f"{'':<22} -> {finding.do}")
    if any(finding.state == BROKEN for finding in findings):
        sys.exit(1)


def examine(wanted: str | None = None) -> list[Finding]:
    """All findings, in the order in which they matter."""
    holder = tpu_in_use()
    asked = wanted or os.environ.get("JAX_PLATFORMS") or None
    checks: tuple[Callable[[], Finding], ...] = (packages, memory, disk, cache, environments, atari, proxies, ports)
    return [holder, devices(asked), *(check() for check in checks), compiler(), tools()]


def packages() -> Finding:
    """The libraries that training needs, and whether jax and jaxlib belong together."""
    versions = {name: _version(name) for name in ("podracer", *NEEDED)}
    missing = [name for name in NEEDED if versions[name] is None]
    text = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    text = f"Python {platform.python_version()}, {text}"
    if missing:
        do = "pip install . in the source folder, or make test"
        return Finding("packages", BROKEN, f"missing: {', '.join(missing)}", do)
    if versions["jax"] != versions["jaxlib"]:
        do = f"pip install jaxlib=={versions['jax']}"
        return Finding("packages", WARN, f"jax {versions['jax']} with jaxlib {versions['jaxlib']}", do)
    return Finding("packages", OK, text)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def disk() -> Finding:
    """Room for runs, where the command was started."""
    free = shutil.disk_usage(".").free / 1e9
    if not os.access(".", os.W_OK):
        return Finding("disk", BROKEN, "the current folder cannot be written", "change to another, or give --run")
    if free < LOW_DISK_GB:
        return Finding("disk", WARN, f"{free:.1f} GB are free here", "make room, or give --run on another disk")
    return Finding("disk", OK, f"{free:,.0f} GB are free here")


def cache() -> Finding:
    """Where compiled programs are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = pathlib.Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or os.path.join(base, "podracer", "xla"))
    if str(path).startswith("gs:"):
        do = "a wrong bucket lets JAX hang; try it with gcloud storage ls first"
        return Finding("cache", WARN, f"compiled programs go to a bucket, {path}", do)
    there = next((each for each in (path, *path.parents) if each.exists()), path)
    if not os.access(there, os.W_OK):
        return Finding("cache", WARN, f"{path} cannot be written: every start compiles anew", "set XDG_CACHE_HOME")
    return Finding("cache", OK, f"compiled programs are kept in {path}")


def environments() -> Finding:
    """Libraries of environments."""
    names = ("gymnax", "brax", "jumanji", "pgx", "navix", "xminigrid", "craftax", "gymnasium", "ale_py")
    there = [name for name in names if importlib.util.find_spec(name) is not None]
    do = "" if len(there) == len(names) else "the others: pip install '.[envs]' in the source folder"
    return Finding("environments", OK, ", ".join(there) or "those of podracer alone", do)


def atari() -> Finding:
    """Whether an Atari game runs: one environment, a few steps, in a process of its own, as it may crash."""
    if importlib.util.find_spec("envpool") is None:
        do = "pip install envpool (Linux), for atari/... and envpool/..."
        return Finding("atari", WARN, "envpool is not installed", do)
    do = "pip install --force-reinstall envpool, or use ale/... (ale-py) instead of atari/..."
    root = pathlib.Path(__file__).resolve().parents[1]
    try:
        done = subprocess.run(
            [sys.executable, "-c", GAME, str(root)],
            capture_output=True,
            text=True,
            timeout=GAME_TIMEOUT_S,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
    except subprocess.TimeoutExpired:
        return Finding("atari", WARN, f"Pong did not make ten steps within {GAME_TIMEOUT_S:g} s", do)
    name = f"envpool {_version('envpool')}"
    if done.returncode:
        last = ([line for line in done.stderr.splitlines() if line.strip()] or ["no message"])[-1]
        return Finding("atari", WARN, f"Pong does not run with {name} (status {done.returncode}): {last[:200]}", do)
    return Finding("atari", OK, f"Pong runs with {name}")


def compiler() -> Finding:
    """Whether `podracer compile` has the TPU compiler."""
    version = _version("libtpu")
    if version is None:
        do = "for podracer compile: pip install '.[tpu]' in the source folder"
        return Finding("compiler", OK, "no TPU compiler (libtpu)", do)
    return Finding("compiler", OK, f"libtpu {version}, for podracer compile")


def proxies() -> Finding:
    """Settings that can keep hosts from finding one another; their values may hold passwords and stay unsaid."""
    names = sorted(
        name for name in os.environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
    )
    if names:
        do = f"for runs over several hosts: unset {' '.join(names)}, or name the hosts in no_proxy"
        return Finding("proxies", WARN, f"{', '.join(names)} can make the start over several hosts hang", do)
    return Finding("proxies", OK, "none")


def ports() -> Finding:
    """Whether the ports over which hosts find one another are free."""
    taken = [port for port in PORTS if not _is_free(port)]
    if taken:
        text = "; ".join(f"port {port} is taken ({PORTS[port]})" for port in taken)
        return Finding("ports", WARN, text, "another run may be going on here; or set JAX_COORDINATOR_PORT")
    return Finding("ports", OK, f"{', '.join(map(str, PORTS))} are free")


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def tools() -> Finding:
    """What `podracer launch` calls."""
    found = [name for name in ("gcloud", "kubectl", "docker", "sbatch", "git") if shutil.which(name)]
    return Finding("tools", OK, f"for podracer launch: {', '.join(found) or 'none'}")
