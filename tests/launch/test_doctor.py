"""What the doctor finds on machines that are made of files."""

from __future__ import annotations

import json
import os
import socket
import sys

import pytest

from launch import cli, doctor, hardware


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A root folder of another machine, and no wait for JAX."""
    monkeypatch.setattr(hardware, "ROOT", tmp_path)
    for name in ("dev", "tmp", "proc"):
        (tmp_path / name).mkdir()
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    return tmp_path


def python(monkeypatch, tmp_path, text):
    """Stands for the Python that starts JAX."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


FOUND = 'echo \'["cpu", 2, "cpu", 1]\''


def test_this_machine_for_real(capsys):
    """JAX in a process of its own; nothing that is needed is broken here."""
    cli.main(["doctor", "--platform", "cpu"])
    out = capsys.readouterr().out
    assert "asked for cpu, found cpu" in out and "broken" not in out
    for name in ("packages", "memory", "disk", "cache", "environments", "emulator", "proxies", "ports", "tools"):
        assert f" {name}" in out


def test_a_platform_that_is_not_there_is_broken(machine, monkeypatch, tmp_path):
    python(monkeypatch, tmp_path, 'echo "RuntimeError: Unable to initialize backend $JAX_PLATFORMS" >&2; exit 1')
    finding = hardware.devices("tpu")
    assert finding.state == hardware.BROKEN and "Unable to initialize backend tpu" in finding.found
    assert "podracer[tpu]" in finding.do


def test_a_start_that_hangs_is_told(machine, monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "JAX_TIMEOUT_S", 0.2)
    python(monkeypatch, tmp_path, "exec sleep 5")
    finding = hardware.devices(None)
    assert finding.state == hardware.BROKEN and "did not start within 0.2 s" in finding.found


def test_an_accelerator_that_jax_does_not_use(machine, monkeypatch, tmp_path):
    """The silent fall-back to the CPU."""
    python(monkeypatch, tmp_path, FOUND)
    assert hardware.devices(None).state == hardware.OK
    (machine / "dev" / "accel0").touch()
    finding = hardware.devices(None)
    assert finding.state == hardware.WARN and "/dev/accel0" in finding.found
    assert hardware.devices("cpu").state == hardware.OK


def test_a_tpu_that_another_process_holds(machine):
    assert hardware.tpu_in_use().found == "no TPU on this machine"
    (machine / "dev" / "accel0").touch()
    assert hardware.tpu_in_use().found == "free: /dev/accel0"
    (machine / "proc" / "4711" / "fd").mkdir(parents=True)
    (machine / "proc" / "4711" / "comm").write_text("python3\n")
    (machine / "proc" / "4711" / "fd" / "5").symlink_to("/dev/accel0")
    finding = hardware.tpu_in_use()
    assert finding.state == hardware.BROKEN and "process 4711 (python3)" in finding.found and "kill PID" in finding.do


def test_a_lock_that_was_left(machine):
    (machine / "tmp" / "libtpu_lockfile").touch()
    finding = hardware.tpu_in_use()
    assert finding.state == hardware.WARN and finding.do.endswith("rm /tmp/libtpu_lockfile")


def test_proxies_are_named_without_their_values(machine, monkeypatch):
    assert doctor.proxies().state == hardware.OK
    monkeypatch.setenv("HTTPS_PROXY", "http://user:secret@host:1")
    finding = doctor.proxies()
    assert finding.state == hardware.WARN and "unset HTTPS_PROXY" in finding.do and "secret" not in str(finding)


def test_a_port_that_is_taken(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr(doctor, "PORTS", {taken.getsockname()[1]: "somebody"})
        assert doctor.ports().state == hardware.WARN
    assert doctor.ports().state == hardware.OK


def test_memory_and_what_is_missing(machine, monkeypatch):
    (machine / "proc" / "meminfo").write_text("MemTotal: 8000000 kB\nMemAvailable: 1000000 kB\n")
    assert hardware.memory() == hardware.Finding(
        "memory", hardware.WARN, "1.0 GB of 8.0 GB are free", hardware.memory().do
    )
    monkeypatch.setattr(doctor, "NEEDED", ("jax", "no-such-library"))
    finding = doctor.packages()
    assert finding.state == hardware.BROKEN and finding.found == "missing: no-such-library"


def test_a_cache_in_a_bucket_may_hang(monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "gs://bucket/cache")
    assert doctor.cache().state == hardware.WARN


def test_broken_is_status_1_and_json_holds_all(machine, monkeypatch, tmp_path, capsys):
    python(monkeypatch, tmp_path, "exit 1")
    with pytest.raises(SystemExit) as exit_:
        cli.main(["doctor", "--json"])
    assert exit_.value.code == 1
    found = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert found["devices"]["state"] == "broken" and set(found["devices"]) == {"name", "state", "found", "do"}
    assert len(found) == 11
