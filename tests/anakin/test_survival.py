"""The quick part of `benchmarks/survival.py`: real kills, and a real full disk."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "survival.py"


def survive(tmp_path, *arguments):
    out = tmp_path / "out.json"
    line = [sys.executable, str(SCRIPT), *arguments, "--out", str(out)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=600, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())["results"]


@pytest.mark.long
def test_a_killed_run_loses_nothing_and_ends_the_same(tmp_path):
    """Twice, once while a checkpoint is written; more often in the benchmark."""
    results = survive(tmp_path, "--parts", "a", "--times", "2")
    assert [(each["good"], each["tried"]) for each in results] == [(1, 1), (1, 1)]
    for each in results:
        found = re.search(r"(\d+)/(\d+) finished runs bit-identical; 0 checkpoints lost", each["notes"])
        same, finished = found.groups()
        assert same == finished and int(finished) >= 1


@pytest.mark.slow
def test_a_full_disk_stops_a_run_in_time_and_leaves_its_last_checkpoint(tmp_path):
    """In a tmpfs of its own."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("no name spaces here for a small disk of its own")
    (result,) = survive(tmp_path, "--parts", "e", "--times", "1")
    assert result["good"] == 1
