"""Traces of some updates: which of them, and the names of the phases in them."""

from __future__ import annotations

import jax
import pytest

import anakin
import sebulba
from podracer import agents, envs, networks, profile
from podracer.errors import UserError

SMALL = {"unroll_length": 4, "total_steps": 256, "evaluations": 2, "eval_episodes": 2}


@pytest.mark.parametrize("text", ["", "3", "3:", ":3", "a:b", "0:2", "4:3", "-1:2", "1:2:3", "1.5:2"])
def test_what_is_no_range_of_updates_is_refused(text):
    with pytest.raises(UserError, match=r"profile is '.*'; expected START:STOP"):
        anakin.Settings(profile=text)


def test_one_update_is_a_range():
    assert profile.parse("3:3") == (3, 3) and profile.parse("1:20") == (1, 20) and profile.parse(None) is None


def test_a_trace_that_could_not_be_is_refused_before_anything_is_written(tmp_path):
    env = envs.Catch()
    agent = agents.a2c(env.spec)
    with pytest.raises(UserError, match="there is no run directory for the trace"):
        anakin.train(agent, env, profile="1:2")
    for train, sizes in ((anakin.train, {"batch_per_core": 8}), (sebulba.train, {"batch_size": 8})):
        with pytest.raises(UserError, match="profile is '900:901', but the run ends with update"):
            train(agent, env, run_dir=tmp_path / "run", profile="900:901", cores=2, **SMALL, **sizes)
    assert list(tmp_path.iterdir()) == []


class Calls:
    """In place of JAX's profiler: what was started and stopped, between which updates."""

    def __init__(self, monkeypatch):
        self.seen = []
        monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: self.seen.append("start"))
        monkeypatch.setattr(jax.profiler, "stop_trace", lambda: self.seen.append("stop"))


@pytest.mark.parametrize(
    ("text", "per_call", "expected"),
    [
        ("3:4", 1, [1, 2, "start", 3, 4, "stop", 5, 6]),
        ("3:4", 2, [2, "start", 4, "stop", 6]),  # whole calls
        ("2:5", 2, ["start", 2, 4, 6, "stop"]),
        ("5:9", 1, [1, 2, 3, 4, "start", 5, 6, "stop"]),  # the run ends first
        (None, 1, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_the_calls_that_hold_the_updates_are_traced(monkeypatch, tmp_path, text, per_call, expected):
    calls = Calls(monkeypatch)
    with profile.tracing(text, tmp_path) as trace:
        for last in range(per_call, 7, per_call):
            with trace.step(last - per_call + 1, last):
                calls.seen.append(last)
            trace.after(last)
    assert calls.seen == expected


def test_a_trace_is_closed_when_a_run_fails(monkeypatch, tmp_path):
    calls = Calls(monkeypatch)
    with pytest.raises(ZeroDivisionError), profile.tracing("1:5", tmp_path) as trace, trace.step(1, 1):
        _ = 1 / 0
    assert calls.seen == ["start", "stop"]


@pytest.mark.parametrize("architecture", [anakin, sebulba])
def test_a_run_that_goes_on_traces_what_it_is_told_to(monkeypatch, tmp_path, capsys, architecture):
    """By the same command with `or_resume`, and by `resume`, which else keeps the run's own."""
    calls, env = Calls(monkeypatch), envs.Catch()
    agent = agents.a2c(env.spec, network=networks.mlp((8,)))
    anakins, sebulbas = {"batch_per_core": 8, "updates_per_call": 1}, {"batch_size": 8, "probe": False}
    sizes = anakins if architecture is anakin else sebulbas
    sizes |= {"unroll_length": 4, "evaluations": 0, "run_dir": tmp_path / "run", "cores": 1}
    per_update = 32 if architecture is anakin else 64
    end = lambda updates: {"total_steps": updates * per_update}
    architecture.train(agent, env, profile="2:2", **end(2), **sizes)
    assert calls.seen == ["start", "stop"]
    architecture.train(agent, env, profile="4:4", or_resume=True, **end(4), **sizes)
    assert calls.seen == ["start", "stop"] * 2
    assert "nothing is traced" not in capsys.readouterr().err
    with pytest.raises(UserError, match="profile is '9:9', but the run ends with update 6"):
        architecture.resume(tmp_path / "run", cores=1, profile="9:9", **end(6))
    architecture.resume(tmp_path / "run", cores=1, **end(5))
    assert calls.seen == ["start", "stop"] * 2
    assert "nothing is traced: profile is '2:2', and the run goes on with update 5" in capsys.readouterr().err
    architecture.resume(tmp_path / "run", cores=1, profile="6:6", **end(6))
    assert calls.seen == ["start", "stop"] * 3


def trace_of(directory):
    """`(file, names of all events)` of the only trace of a run."""
    (path,) = (directory / "tensorboard" / "plugins" / "profile").glob("*/*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(path))
    return path, {event.name for plane in data.planes for line in plane.lines for event in line.events}


def test_a_trace_of_anakin_names_its_phases(tmp_path):
    """Those of the program stand in its operations' names, those of the host in its threads."""
    env = envs.Catch()
    agent = agents.a2c(env.spec, network=networks.mlp((8,)))
    sizes = {"batch_per_core": 4, "updates_per_call": 2}
    anakin.train(agent, env, cores=2, run_dir=tmp_path / "run", sinks=[], profile="3:5", **SMALL, **sizes)
    path, names = trace_of(tmp_path / "run")
    assert {"updates", "evaluation", "checkpoint"} <= {name.partition("#")[0] for name in names}
    content = path.read_bytes()
    assert [phase for phase in ("acting", "environment", "learning") if f"/{phase}/".encode() not in content] == []


def test_a_trace_of_sebulba_names_its_phases(tmp_path):
    env = envs.Catch()
    agent = agents.a2c(env.spec, network=networks.mlp((8,)))
    sizes = {"batch_size": 8, "probe": False}
    sebulba.train(agent, env, cores=2, run_dir=tmp_path / "run", sinks=[], profile="1:4", **SMALL, **sizes)
    _, names = trace_of(tmp_path / "run")
    assert {"acting", "environment", "learning", "publishing", "checkpoint", "evaluation"} <= names
