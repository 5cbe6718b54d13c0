"""Checkpoints of two real processes: written by both, read by other numbers of hosts and cores."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).with_name("several_hosts.py")
ROOT = SCRIPT.parents[2]


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def hosts(count, cores, what, directory):
    """The output of each host."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(cores), "PYTHONPATH": str(ROOT)}
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(number), str(count), port, what, str(directory)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    try:
        results = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (out, err) in zip(processes, results):
        assert process.returncode == 0 and f"done {count * cores} {count}" in out, err[-2000:]
    return [out for out, _ in results]


@pytest.mark.slow
def test_what_two_hosts_wrote_other_numbers_of_hosts_and_cores_read(tmp_path):
    """2 x 2 save; 1 x 1, 1 x 4 and 2 x 1 read. What the first host cannot write, both are told."""
    assert all("refused" in out for out in hosts(2, 2, "save", tmp_path))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["20-1", "30"]
    files = [path.name for path in (tmp_path / "checkpoints" / "30" / "state").iterdir()]
    assert {"ocdbt.process_0", "ocdbt.process_1"} <= set(files)  # each wrote its part
    assert not (tmp_path / "best-1").exists()
    for count, cores in ((1, 1), (1, 4), (2, 1)):
        hosts(count, cores, "read", tmp_path)
