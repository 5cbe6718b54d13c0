"""What one must know to repeat a run, and what its program needs."""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import pathlib
import platform
import subprocess
import sys
from typing import Any

import jax

from podracer import mesh

PACKAGES = ("podracer", "jax", "jaxlib", "flax", "optax", "rlax", "orbax-checkpoint", "numpy", "gymnax", "envpool")


def memory_of(compiled: Any) -> str:
    """Estimated memory of a compiled program, in words."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return "an unknown amount of memory"
    used = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + analysis.output_size_in_bytes
    return f"{max(math.ceil((used - analysis.alias_size_in_bytes) / 1e6), 1):,} MB"


def environment_facts(cores: Any) -> dict[str, Any]:
    """What one must know to repeat a run: command, versions, commit, devices, date."""
    return {
        "command": [pathlib.Path(sys.argv[0]).name, *sys.argv[1:]],
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "git_commit": _git_commit(),
        "devices": mesh.describe(list(cores.devices.flat)),
        "platform": jax.default_backend(),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """The commit of the source tree this runs from, or None."""
    here = pathlib.Path(__file__).resolve().parent
    command = ["git", "-C", str(here), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
