"""What the tables of the benchmarks share: where the scripts are, and on which machine they ran."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def where_and_when(command: Sequence[str]) -> str:
    """Machine, command, commit and date, for the top of a table."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run(
        [*git, "status", "--porcelain", "-uno", "--", "podracer", "anakin", "sebulba"], capture_output=True, text=True
    ).stdout.strip()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return "\n".join(
        [
            f"machine: {_processor()}, {os.cpu_count()} CPUs, load {load:.1f} before the start",
            f"command: {' '.join(command)}",
            f"commit: {commit or 'unknown'}{' with local changes' if changed else ''}",
            f"date: {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}",
        ]
    )


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
