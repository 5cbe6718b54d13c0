"""Sebulba: repeatable, never hanging, every failure surfaces, nothing is left behind."""

from __future__ import annotations

import threading
import time

import jax
import numpy as np
import pytest

from podracer import agents, networks
from podracer.agents.a2c import Config
from podracer.envs.host import on_host
from podracer.errors import UserError
from sebulba.lag import Lag
from sebulba.loop import Sebulba
from sebulba.seeds import environment_seeds
from sebulba.topology import split
from tests.sebulba.scripted import OPEN, Scripted

SMALL = networks.mlp((8,))


def make(env=None, cores=2, actor_cores=1, threads=2, lag="fixed", seed=0, **options):
    env = env or Scripted()
    agent = agents.a2c(env.spec, Config(), SMALL)
    topology = split(cores, actor_cores, threads, env.batch_size)
    return Sebulba(agent, env, topology, 4, Lag.parse(lag), seed=seed, **options)


def run(system, updates=6):
    seen = []
    system.run(updates, lambda update: bool(seen.append(update)))
    return seen


def left_behind():
    names = [t.name for t in threading.enumerate() if t.name.startswith(("actor-", "learner"))]
    return names, set(OPEN)


def weights(system):
    return jax.tree.map(np.asarray, jax.device_get(system.learner.state.params.weights))


@pytest.mark.parametrize("lag", ["sync", "fixed", "fixed:2"])
def test_two_runs_with_one_seed_are_bit_identical(lag):
    first, second = make(lag=lag), make(lag=lag)
    run(first)
    run(second)
    assert jax.tree.all(jax.tree.map(np.array_equal, weights(first), weights(second)))
    other = make(lag=lag, seed=1)
    run(other)
    assert not jax.tree.all(jax.tree.map(np.array_equal, weights(first), weights(other)))


@pytest.mark.parametrize(("lag", "expected"), [("sync", 0), ("fixed", 1), ("fixed:2", 2)])
def test_lag_is_what_was_asked_for(lag, expected):
    lags = [update.lags for update in run(make(lag=lag))]
    assert lags[expected:] == [[expected] * 2] * (6 - expected)
    assert all(max(at) <= expected for at in lags)


def test_bounded_lag_never_trains_on_older_params():
    updates = run(make(Scripted(delay_s=0.001), lag="bounded:1", threads=3), 12)
    assert max(max(update.lags) for update in updates) <= 1


@pytest.mark.parametrize(("cores", "actor_cores", "batch_size"), [(1, 1, 8), (8, 1, 28), (8, 2, 12), (8, 4, 8)])
def test_splits_of_the_cores(cores, actor_cores, batch_size):
    system = make(Scripted(batch_size=batch_size), cores, actor_cores)
    updates = run(system, 3)
    assert [u.number for u in updates] == [1, 2, 3]
    assert updates[-1].steps == 3 * system.env.batch_size * 4 * system.topology.num_threads


@pytest.mark.parametrize(
    ("cores", "batch_size", "acting"),
    [(1, 64, 1), (2, 64, 1), (4, 64, 2), (8, 64, 4), (8, 96, 2), (8, 7, 1), (4, 1, 3)],
)
def test_by_default_as_many_learn_as_divide_the_batch(cores, batch_size, acting):
    """So that the same command works on hosts of any number of cores."""
    topology = split(cores, None, 2, batch_size)
    assert len(topology.actor_cores) == acting
    assert len(topology.learner_cores) == max(cores - acting, 1) and batch_size % len(topology.learner_cores) == 0


def test_scores_are_those_of_the_script():
    """5 rewards of the seed's last digit each; episodes of 5 steps and a reset."""
    system = make()
    digits = sorted(seed % 10 for thread in environment_seeds(0, 0, 0, 2, 8) for seed in thread)
    episodes = [episode for update in run(system, 3) for episode in update.episodes]
    assert {episode.length for episode in episodes} == {5}
    # 12 steps of each thread: two whole episodes (steps 5 and 11) of each environment.
    assert sorted(episode.score for episode in episodes) == sorted(5.0 * d for d in digits for _ in range(2))


def test_accumulate_and_splits_make_larger_and_more_updates():
    system = make(accumulate=2, learner_splits=4)
    updates = run(system, 2)
    assert updates[0].steps == 2 * 2 * 8 * 4
    assert int(system.learner.state.params.updates) == 2 * 4


def test_an_environment_that_fails_stops_everything():
    system = make(Scripted(fail_at=9))
    started = time.monotonic()
    with pytest.raises(ValueError, match="the scripted environment fails here"):
        run(system, 1000)
    assert left_behind() == ([], set())
    assert time.monotonic() - started < 60


def test_a_learner_that_fails_stops_everything():
    def fail(update):
        raise RuntimeError("on_update fails here")

    system = make()
    with pytest.raises(RuntimeError, match="on_update fails here"):
        system.run(1000, fail)
    assert left_behind() == ([], set())


def test_a_publish_that_fails_stops_everything(monkeypatch):
    system = make()

    def fail(version, params):
        raise OSError("publish fails here")

    monkeypatch.setattr(system._store, "publish", fail)
    with pytest.raises(OSError, match="publish fails here"):
        run(system)
    assert left_behind() == ([], set())


def test_stopping_at_any_moment_leaves_nothing():
    for count in range(1, 8):
        system = make(Scripted(delay_s=0.0005))
        system.run(1000, lambda update, count=count: update.number >= count)
        assert system.learner.updates == count
        assert left_behind() == ([], set())


def test_seeds_are_disjoint():
    lists = [environment_seeds(seed, restart, host, 3, 50) for seed in (0, 1) for restart in (0, 1) for host in (0, 1)]
    drawn = [seed for threads in lists for batch in threads for seed in batch]
    assert len(set(drawn)) == len(drawn) == 8 * 150


@pytest.mark.parametrize("text", ["late", "bounded", "bounded:0", "fixed:-1", "sync:1", ""])
def test_bad_lags_are_refused(text):
    with pytest.raises(UserError, match="expected sync, fixed"):
        Lag.parse(text)


def test_bad_splits_are_refused():
    with pytest.raises(UserError, match="at least one core left to learn"):
        split(4, 4, 1, 8)
    with pytest.raises(UserError, match="batch_size = 8 does not divide into learner cores = 3"):
        split(4, 1, 1, 8)


def test_bridge_and_jittable_batch_agree():
    """The host bridge says what the batch itself says, for the same keys."""
    from podracer.envs import Catch
    from podracer.envs.batch import Batch

    host = on_host(Catch(), 4).start([1, 2, 3, 4])
    keys = jax.vmap(jax.random.key)(np.arange(1, 5, dtype=np.uint32))
    state, expected = Batch(Catch()).init(keys)
    step = host.reset()
    rng = np.random.default_rng(0)
    for number in range(1, 25):
        jax.tree.map(np.testing.assert_array_equal, step.timestep, jax.tree.map(np.asarray, expected))
        action = rng.integers(0, 3, 4).astype(np.int32)
        step = host.step(action)
        number_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, np.uint32(number))
        state, expected = Batch(Catch()).step(state, action, number_keys)
