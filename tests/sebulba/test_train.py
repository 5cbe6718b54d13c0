"""`sebulba.train`: a whole run, its files, its rows, its ends."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

import sebulba
from podracer import agents, networks
from podracer.agents.a2c import Config
from podracer.checkpoint import Checkpoints
from podracer.errors import UserError
from podracer.runs import NonFiniteLoss
from sebulba import probe
from sebulba.report import starvation
from sebulba.run import Run
from tests.sebulba.scripted import OPEN, Scripted

WAITS = ["queue_get", "learner_step", "publish", "environment", "inference", "transfer", "params", "queue_put"]
SMALL = networks.mlp((8,))
TINY = {"batch_size": 8, "unroll_length": 4, "eval_episodes": 3, "cores": 2, "probe": False, "total_steps": 6 * 64}


def agent(env, **config):
    return agents.a2c(env.spec, Config(**config), SMALL)


def train(env=None, **options) -> Run:
    env = env or Scripted()
    return sebulba.train(agent(env), env, sinks=(), **{**TINY, **options})


def rows(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def weights(run):
    return jax.tree.leaves(jax.device_get(run.params.weights))


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))


def left_behind():
    names = [t.name for t in threading.enumerate() if t.name.startswith(("actor-", "learner", "evaluator", "probe-"))]
    return names, set(OPEN)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "one"
    return directory, train(run_dir=directory, evaluations=3)


def test_a_run_leaves_settings_rows_and_checkpoints(finished):
    directory, run = finished
    assert left_behind() == ([], set())
    assert run.steps == 384 and run.updates == 6
    content = json.loads((directory / "config.json").read_text())
    assert content["architecture"] == "sebulba" and content["settings"]["batch_size"] == 8
    training = [row for row in rows(directory) if "steps_per_s" in row]
    assert [row["steps"] for row in training] == [64, 128, 192, 256, 320, 384]
    last = training[-1]
    assert last["frames"] == last["steps"] and last["updates"] == 6 and last["nonfinite_updates"] == 0
    assert last["lag_mean"] == 1 and last["lag_1"] == 2
    assert sum(row["acting_steps_per_s"] for row in training) > 0
    waits = {name for name in last if name.startswith("wait_")}
    assert waits == {
        f"wait_{name}_s"
        for name in [
            "queue_get",
            "learner_step",
            "publish",
            "environment",
            "inference",
            "transfer",
            "params",
            "queue_put",
        ]
    }
    assert Checkpoints(directory / "checkpoints").steps() == [256, 384]
    assert [row["steps"] for row in rows(directory) if "eval_return_mean" in row] == [128, 256, 384]
    assert sum("absolute_return_mean" in row for row in rows(directory)) == 1
    assert run.metrics["absolute_episodes"] == 6


def test_returns_are_the_scores_of_whole_games(finished):
    """Five steps that each pay the last digit of the seed."""
    _directory, run = finished
    assert run.metrics["return_max"] <= 45 and run.metrics["episode_length_mean"] == 5
    result = run.evaluate(4)
    assert result.lengths.tolist() == [5] * 4 and result.finished.all() and (result.returns % 5 == 0).all()


def test_evaluations_change_nothing(finished):
    assert same(finished[1], train(evaluations=0))


def test_resume_goes_on_with_new_start_states_and_other_cores(tmp_path, monkeypatch):
    from sebulba import loop

    directory, drawn, original = tmp_path / "run", [], loop.environment_seeds

    def remember(*arguments):
        drawn.append(original(*arguments))
        return drawn[-1]

    monkeypatch.setattr(loop, "environment_seeds", remember)
    env = Scripted()
    before = train(env, run_dir=directory, evaluations=2)
    with pytest.raises(UserError, match="is finished"):
        sebulba.resume(directory, agent=agent(env), env=env, sinks=())
    options = {"agent": agent(env), "env": env, "sinks": (), "total_steps": 1024, "cores": 4}
    run = sebulba.resume(directory, actor_cores=2, threads_per_core=1, batch_size=16, **options)
    assert run.steps == 1024 and run.restarts == 1
    assert run.updates == 6 + 5  # 640 more steps, 128 per update
    assert int(run.params.updates) == 11 and not same(before, run)
    first, second = ({seed for thread in seeds for seed in thread} for seeds in drawn)
    assert not first & second
    steps = [row["steps"] for row in rows(directory) if "steps_per_s" in row]
    assert steps == sorted(steps) and steps[-1] == 1024
    assert run.best_score >= before.best_score
    again = sebulba.resume(directory, agent=agent(env), env=env, sinks=(), total_steps=1100, cores=2)
    assert again.restarts == 2


def test_a_replay_begins_empty_on_other_learner_cores(tmp_path):
    """A number in each core's memory counts the updates."""
    env, directory = Scripted(), tmp_path / "run"
    plain = agent(env)

    def learner_step(state, *inputs):
        following, metrics = plain.learner_step(state._replace(memory=()), *inputs)
        return following._replace(memory=state.memory + 1), metrics

    initial = lambda key: plain.initial_learner_state(key)._replace(memory=jax.numpy.zeros(()))
    counting = dataclasses.replace(plain, initial_learner_state=initial, learner_step=learner_step)
    options = {"sinks": (), "cores": 3}
    sebulba.train(counting, env, run_dir=directory, **{**TINY, **options, "evaluations": 0})
    options |= {"agent": counting, "env": env, "total_steps": 8 * 64}
    run = sebulba.resume(directory, **options)
    assert run.loop.learner.state.memory.tolist() == [8, 8]
    run = sebulba.resume(directory, **{**options, "cores": 2, "total_steps": 10 * 64})
    assert run.loop.learner.state.memory.tolist() == [2]
    assert int(run.params.updates) == 10


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    env = Scripted()
    broken = agent(env)

    def learner_step(state, trajectory, key, axis_name):
        state, metrics = broken.learner_step(state, trajectory, key, axis_name)
        bad = state.params.updates >= 3
        return state, metrics | {"nonfinite_updates": bad.astype("float32")}

    broken_agent = dataclasses.replace(broken, learner_step=learner_step)
    options = {**TINY, "evaluations": 0, "sinks": ()}
    with pytest.raises(NonFiniteLoss, match="the loss of update 3 is not finite"):
        sebulba.train(broken_agent, env, run_dir=tmp_path / "run", **options)
    assert left_behind() == ([], set())
    assert sebulba.train(broken_agent, env, nan="skip", **options).metrics["nonfinite_updates"] == 1


@pytest.mark.parametrize("where", ["acting", "collecting", "queue", "publishing", "evaluating", "reporting"])
def test_every_failure_surfaces_and_leaves_nothing(where, monkeypatch):
    from podracer import evaluate
    from sebulba import actor, params, queue, report

    def fail(*_, **__):
        raise RuntimeError(f"{where} fails here")

    target, name = {
        "acting": (actor.ActorPrograms, "_act"),
        "collecting": (actor, "pack"),
        "queue": (queue.Queue, "put"),
        "publishing": (params.ParamStore, "publish"),
        "evaluating": (evaluate.HostEvaluator, "_play"),
        "reporting": (report.Report, "add"),
    }[where]
    monkeypatch.setattr(target, name, fail)
    with pytest.raises(RuntimeError, match=f"{where} fails here"):
        train(total_steps=100_000)
    assert left_behind() == ([], set())


def test_a_thousand_updates_grow_nothing():
    """The learner slow, then the actors slow: neither waits for ever, and nothing piles up."""
    env, system, alive = Scripted(batch_size=2), None, []
    for slow in ("learner", "actors"):
        recipe = dataclasses.replace(env, delay_s=0.0005 if slow == "actors" else 0.0)
        settings = sebulba.Settings(batch_size=2, unroll_length=2, threads_per_core=2)
        system = sebulba.settings.build_loop(agent(recipe), recipe, settings, 2)

        def count(update, slow=slow):
            time.sleep(0.001 if slow == "learner" else 0)
            if update.number in (100, 1000):
                alive.append(len(jax.live_arrays()))
            return False

        system.run(1000, count)
        assert system.learner.updates == 1000
    for early, late in (alive[:2], alive[2:]):
        assert late <= early * 1.3 + 20


def test_stopping_at_any_moment_fifty_times():
    system = sebulba.settings.build_loop(
        agent(Scripted()), Scripted(delay_s=0.0005), sebulba.Settings(batch_size=8, unroll_length=4), 2
    )
    system.run(2, lambda update: False)
    rng = np.random.default_rng(0)
    for _ in range(50):
        until = time.monotonic() + rng.uniform(0, 0.15)
        system.run(10**9, lambda update: False, interrupted=lambda until=until: time.monotonic() > until)
        assert time.monotonic() - until < 10
        assert left_behind() == ([], set())


def test_the_probe_counts_steps_and_closes():
    assert 0 < probe.steps_per_s(Scripted(delay_s=0.01), 2, 0.3) <= 2 * 8 / 0.01
    with pytest.raises(ValueError, match="the scripted environment fails here"):
        probe.steps_per_s(Scripted(fail_at=3), 2, 5.0)
    assert left_behind() == ([], set())


def test_who_starves_is_said_in_words():
    waits = dict.fromkeys(WAITS, 0.1)
    row = lambda **changes: {f"wait_{name}_s": value for name, value in {**waits, **changes}.items()}
    assert "The learner starves; environments are the limit" in starvation(row(queue_get=1.0, environment=1.0))
    assert "The learner starves; inference is the limit" in starvation(row(queue_get=1.0, inference=1.0))
    assert "The actors starve; the learner is the limit" in starvation(row(learner_step=1.0, params=1.0))
    assert "Both are busy" in starvation(row(learner_step=1.0, environment=1.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lag": "later"}, "lag is 'later'; expected sync, fixed"),
        ({"actor_cores": 2}, "at least one core left to learn"),
        ({"cores": 4, "actor_cores": 1, "batch_size": 7}, "batch_size = 7 does not divide into learner cores = 3"),
        ({"learner_splits": 5}, "does not divide into learner_splits = 5"),
        ({"stall_timeout": 0.0}, "stall_timeout is 0; expected a finite number > 0"),
        ({"threads_per_core": 0}, "threads_per_core is 0"),
        ({"batch_sizes": 4}, "unknown setting 'batch_sizes'"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_written(changes, message, tmp_path):
    with pytest.raises(UserError, match=message):
        train(run_dir=tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


HANGS = """
import dataclasses, sys, threading
from podracer import mesh
mesh.start_backend("cpu", 2)
import sebulba
from podracer import agents, networks
from tests.sebulba.scripted import Scripted, ScriptedBatch

class Hangs(Scripted):
    def start(self, seeds):
        return HangsBatch(self, seeds)

class HangsBatch(ScriptedBatch):
    def step(self, action):
        if self._total > 20:
            threading.Event().wait()  # a C++ call that never comes back
        return super().step(action)

env = Hangs()
agent = agents.a2c(env.spec, network=networks.mlp((8,)))
sebulba.train(agent, env, total_steps=10**6, batch_size=8, unroll_length=4, probe=False, evaluations=0,
              stall_timeout=float(sys.argv[1]), run_dir=sys.argv[2])
"""


def script(*arguments):
    found = {**os.environ, "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir}
    found |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05", "PYTHONPATH": os.getcwd()}
    line = [sys.executable, "-c", HANGS, *map(str, arguments)]
    return subprocess.Popen(line, env=found, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_stall_ends_the_process_with_every_stack(tmp_path):
    process = script(3, tmp_path / "run")
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "no sign of life from actor-" in err and "while acting" in err and "in step" in err, err
    assert "Queues: actor-0 0 of 2, actor-1 0 of 2." in err


def test_a_second_ctrl_c_during_a_stall_ends_the_process_at_once(tmp_path):
    process = script(1000, tmp_path / "run")
    until = time.monotonic() + 100
    while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    time.sleep(6)
    assert process.poll() is None  # it might still end by itself
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130 and "do not end; leaving without them" in err
    assert "stopping; waiting for actor-" in err and "Ctrl-C again leaves at once" in err and "Traceback" not in err
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps()  # what was learned is kept all the same
