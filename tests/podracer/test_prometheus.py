"""The newest numbers of a run, served on the loopback interface as long as it runs and no longer."""

from __future__ import annotations

import math
import pathlib
import re
import socket
import threading
import urllib.error
import urllib.request

import pytest

import anakin
import sebulba
from podracer import agents, envs, networks, prometheus
from podracer.errors import UserError


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def get(port, path="/metrics"):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        return answer.read().decode(), answer.headers["Content-Type"]


def values(text):
    """`{name and labels: value}` of Prometheus text, read by the grammar of its lines."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, labels, value = re.fullmatch(r"([a-zA-Z_][a-zA-Z0-9_]*)(\{.*\})? (\S+)", line).groups()
            found[name + (labels or "")] = float(value)
    return found


def listeners(port):
    """Addresses that listen on a port, in hexadecimal, as the kernel lists them."""
    found = []
    for table in ("tcp", "tcp6"):
        path = pathlib.Path("/proc/net") / table
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            _, local, _, state = line.split()[:4]
            address, number = local.split(":")
            if state == "0A" and int(number, 16) == port:
                found.append(address)
    return found


def no_thread_is_left():
    for thread in threading.enumerate():
        if thread.name == "metrics":
            thread.join(10)
            assert not thread.is_alive()


needs_proc = pytest.mark.skipif(not pathlib.Path("/proc/net/tcp").exists(), reason="there is no /proc/net/tcp")


@needs_proc
def test_it_listens_on_loopback_alone_and_not_after_the_end():
    port = free_port()
    sink = prometheus.Prometheus(port, {})
    try:
        assert listeners(port) == ["0100007F"]  # 127.0.0.1, in the byte order of this machine
    finally:
        sink.close()
    assert listeners(port) == []
    no_thread_is_left()
    prometheus.Prometheus(port, {}).close()  # and at once again


def test_the_newest_value_of_each_number_under_its_name():
    """Rows of training and of evaluations have other names; what is no number is left out."""
    port = free_port()
    sink = prometheus.Prometheus(port, {"agent": "ppo", "env": 'a "b"\\'})
    try:
        sink.write({"steps": 100, "steps_per_s": 1234.5, "return_mean": -0.25, "note": "x"})
        sink.write({"steps": 200, "eval_return_mean": math.nan, "loss": math.inf, "wait/queue s": 1e-9})
        text, kind = get(port)
        assert kind.startswith("text/plain; version=0.0.4")
        found = values(text)
        assert math.isnan(found.pop("podracer_eval_return_mean"))
        assert found == {
            'podracer_run_info{agent="ppo",env="a \\"b\\"\\\\"}': 1,
            "podracer_steps": 200,
            "podracer_steps_per_s": 1234.5,
            "podracer_return_mean": -0.25,
            "podracer_loss": math.inf,
            "podracer_wait_queue_s": 1e-9,
        }
        assert text.count("# TYPE ") == len(found) + 1 and text.endswith("\n")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(port, "/etc/passwd")
    finally:
        sink.close()


def test_members_are_labels():
    port = free_port()
    sink = prometheus.Prometheus(port, {})
    try:
        for member in (1, 0):
            sink.write({"steps": 5, "member": member, "return_mean": member / 2})
        text, _ = get(port)
        found = values(text)
        assert found['podracer_return_mean{member="1"}'] == 0.5 and found['podracer_steps{member="0"}'] == 5
        assert text.count("# TYPE podracer_return_mean gauge") == 1
    finally:
        sink.close()


def test_a_client_that_says_nothing_does_not_keep_it_open(monkeypatch):
    monkeypatch.setattr(prometheus, "REQUEST_S", 0.2)
    port = free_port()
    sink = prometheus.Prometheus(port, {})
    with socket.create_connection(("127.0.0.1", port)):
        sink.close()
    no_thread_is_left()


class Scrape:
    """A sink that asks the server as a run goes on."""

    def __init__(self, port):
        self.port, self.texts = port, []

    def write(self, row):
        self.texts.append(get(self.port)[0])

    def close(self):
        pass


def test_a_run_serves_its_rows_while_it_goes_on(tmp_path):
    port, env = free_port(), envs.Catch()
    scrape = Scrape(port)
    changes = {"total_steps": 64, "batch_per_core": 4, "unroll_length": 4, "updates_per_call": 1, "evaluations": 0}
    run = anakin.train(agents.a2c(env.spec), env, cores=1, sinks=[scrape], metrics_port=port, **changes)
    found = values(scrape.texts[-1])  # the given sinks come first: it has the row before
    assert found['podracer_run_info{agent="a2c",env="catch"}'] == 1
    assert found["podracer_steps"] == 48 and run.steps == 64
    assert found["podracer_steps_per_s"] == found["podracer_frames_per_s"] > 0
    with pytest.raises(urllib.error.URLError):
        get(port)


def test_a_port_that_is_taken_is_refused_before_the_run(tmp_path):
    env = envs.Catch()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(UserError, match=f"metrics_port is {port}, but something else listens there"):
            anakin.train(agents.a2c(env.spec), env, run_dir=tmp_path / "run", metrics_port=port)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("architecture", [anakin, sebulba])
def test_a_run_whose_port_is_taken_goes_on_with_another(tmp_path, architecture):
    """By the same command with `or_resume`, and by `resume`, which else keeps the run's own."""
    first, second, third, env = free_port(), free_port(), free_port(), envs.Catch()
    agent = agents.a2c(env.spec, network=networks.mlp((8,)))
    sizes = {"batch_per_core": 8} if architecture is anakin else {"batch_size": 8, "probe": False}
    sizes |= {"unroll_length": 4, "evaluations": 0, "run_dir": tmp_path / "run", "cores": 1}
    architecture.train(agent, env, sinks=[], total_steps=64, metrics_port=first, **sizes)
    with socket.create_server(("127.0.0.1", first)):
        scrape = Scrape(second)
        changes = {"total_steps": 256, "metrics_port": second, "or_resume": True}
        assert architecture.train(agent, env, sinks=[scrape], **sizes, **changes).steps == 256
        assert values(scrape.texts[-1])["podracer_steps"] > 64
        with pytest.raises(UserError, match=f"metrics_port is {first}, but something else listens there"):
            architecture.resume(tmp_path / "run", cores=1, total_steps=384, sinks=[])
        scrape = Scrape(third)
        architecture.resume(tmp_path / "run", cores=1, total_steps=512, metrics_port=third, sinks=[scrape])
        assert values(scrape.texts[-1])["podracer_steps"] > 256
        # A command that says no port asks for none.
        assert architecture.train(agent, env, sinks=[], total_steps=640, or_resume=True, **sizes).steps == 640


@pytest.mark.parametrize("port", [0, -1, 65_536])
def test_what_is_no_port_is_refused(port):
    env = envs.Catch()
    with pytest.raises(UserError, match=f"metrics_port is {port}; expected a .* number >= 1 and <= 65535"):
        anakin.train(agents.a2c(env.spec), env, metrics_port=port)
