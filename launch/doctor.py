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
import sys
from collections.abc import Callable
from typing import Literal

from launch.hardware import BROKEN, OK, WARN, Finding, devices, memory, tpu_in_use
from launch.parse import parse

NEEDED = ("jax", "jaxlib", "flax", "optax", "chex", "rlax", "mctx", "numpy", "orbax-checkpoint", "tyro", "gymnax")
PORTS = {8476: "jax.distributed as podracer launch starts it", 8482: "jax.distributed on a TPU by default"}
LOW_DISK_GB = 5.0


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
    checks: tuple[Callable[[], Finding], ...] = (packages, memory, disk, cache, environments, emulator, proxies, ports)
    return [holder, devices(asked), *(check() for check in checks), tools()]


def packages() -> Finding:
    """The libraries that training needs, and whether jax and jaxlib belong together."""
    versions = {name: _version(name) for name in ("podracer", *NEEDED)}
    missing = [name for name in NEEDED if versions[name] is None]
    text = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    text = f"Python {platform.python_version()}, {text}"
    if missing:
        return Finding("packages", BROKEN, f"missing: {', '.join(missing)}", "pip install podracer, or make test")
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
    names = ("envpool", "gymnasium", "ale_py", "gymnax", "brax", "jumanji", "pgx")
    there = [name for name in names if importlib.util.find_spec(name) is not None]
    if "envpool" not in there:
        do = "pip install envpool (Linux), for atari/... and envpool/...; others: the extra envs"
        return Finding("environments", WARN, f"no envpool; there are {', '.join(there) or 'none'}", do)
    return Finding("environments", OK, ", ".join(there))


def emulator() -> Finding:
    """The Atari emulator of this project."""
    if importlib.util.find_spec("native") is None:
        return Finding("emulator", OK, "the native emulator is not built; atari/... uses envpool or ale-py")
    return Finding("emulator", OK, "the native emulator is there")


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
