"""What the doctor finds on machines that are made of files."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import sys
from importlib.metadata import version

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


FOUND = 'echo \'["cpu", 2, "cpu", null]\''


def test_this_machine_for_real(capsys):
    """JAX and a game in processes of their own; nothing that is needed is broken here."""
    cli.main(["doctor", "--platform", "cpu"])
    out = capsys.readouterr().out
    assert "asked for cpu, found cpu" in out and "broken" not in out
    names = ["packages", "memory", "disk", "cache", "environments", "atari", "proxies", "ports", "compiler", "tools"]
    assert [name for name in names if f" {name}" not in out] == []


def test_a_platform_that_is_not_there_is_broken(machine, monkeypatch, tmp_path):
    python(monkeypatch, tmp_path, 'echo "RuntimeError: Unable to initialize backend $JAX_PLATFORMS" >&2; exit 1')
    finding = hardware.devices("tpu")
    assert finding.state == hardware.BROKEN and "Unable to initialize backend tpu" in finding.found
    assert "pip install '.[tpu]'" in finding.do


def test_the_memory_of_an_accelerator_is_said(machine, monkeypatch, tmp_path):
    python(monkeypatch, tmp_path, """echo '["tpu", 8, "TPU v3", 17179869184]'""")
    assert "found tpu: 8 x TPU v3 with 17.2 GB of memory each for JAX;" in hardware.devices(None).found
    python(monkeypatch, tmp_path, FOUND)
    assert "memory" not in hardware.devices(None).found


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
    assert len(found) == 12


@pytest.mark.skipif(not importlib.util.find_spec("envpool"), reason="envpool is not installed")
def test_a_game_is_played():
    finding = doctor.atari()
    assert finding == hardware.Finding("atari", hardware.OK, f"Pong runs with envpool {version('envpool')}")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("echo noise; echo 'podracer: no ROM' >&2; exit 1", "(status 1): podracer: no ROM"),
        ("kill -SEGV $$", "(status -11): no message"),
        ("exec sleep 5", "did not make ten steps within 0.2 s"),
    ],
)
def test_a_game_that_does_not_run_is_told(monkeypatch, tmp_path, text, says):
    """It fails, crashes, hangs."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(doctor, "GAME_TIMEOUT_S", 0.2 if "sleep" in text else 60.0)
    python(monkeypatch, tmp_path, text)
    finding = doctor.atari()
    assert finding.state == hardware.WARN and says in finding.found and "ale/..." in finding.do


def test_libraries_that_are_not_installed_say_how_they_are(monkeypatch):
    """None is broken: others do without."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    assert doctor.atari() == hardware.Finding("atari", hardware.WARN, "envpool is not installed", doctor.atari().do)
    assert "pip install envpool" in doctor.atari().do
    assert doctor.environments().found == "those of podracer alone" and "'.[envs]'" in doctor.environments().do
    assert doctor.compiler().state == hardware.OK and "'.[tpu]'" in doctor.compiler().do
