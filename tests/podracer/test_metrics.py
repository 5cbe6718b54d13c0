"""Episode numbers: sums on the device, the window over the last hundred episodes on the host."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import mesh
from podracer.envs import Batch
from podracer.metrics import Ended, Episodes, EpisodeSums, ReturnWindow
from tests.envs import scripted


def sums_of(updates):
    """Sums [U] of the episodes (lists of (return, length)) that ended in each update."""
    columns = [
        (
            len(ended),
            sum(r for r, _ in ended),
            sum(n for _, n in ended),
            min((r for r, _ in ended), default=np.inf),
            max((r for r, _ in ended), default=-np.inf),
        )
        for ended in updates
    ]
    return EpisodeSums(*(np.asarray(column, np.float32) for column in zip(*columns)))


@pytest.mark.parametrize("seed", range(8))
def test_the_window_is_the_newest_updates_with_a_hundred_episodes_counted_one_by_one(seed):
    """Random numbers of episodes per update, in calls of any size, against a recount from the whole history."""
    rng = np.random.default_rng(seed)
    window, history = ReturnWindow(), []
    for _ in range(40):
        call = [
            [
                (float(rng.integers(-50, 50)), int(rng.integers(1, 30)))
                for _ in range(rng.poisson(rng.choice([0, 3, 70])))
            ]
            for _ in range(rng.integers(1, 6))
        ]
        history += call
        window.add(sums_of(call))
        chosen, position = [], len(history)
        while position and len(chosen) < 100:
            position -= 1
            chosen = history[position] + chosen
        total = sum(len(ended) for ended in history)
        if not total:
            assert window.row() == {}
            continue
        returns, lengths = np.asarray(chosen).T
        row = window.row()
        assert row["episodes"] == total
        assert row["window_episodes"] == len(chosen)
        assert row["return_mean"] == pytest.approx(returns.mean(), rel=1e-5, abs=1e-5)
        assert (row["return_min"], row["return_max"]) == (returns.min(), returns.max())
        assert row["episode_length_mean"] == pytest.approx(lengths.mean(), rel=1e-5)


def test_a_window_of_ones_is_the_last_hundred_episodes_exactly():
    """One episode per update: what is older than a hundred is forgotten."""
    window = ReturnWindow()
    window.add(sums_of([[(float(n), 1)] for n in range(250)]))
    assert window.row()["return_mean"] == np.mean(np.arange(150, 250))
    assert window.row()["window_episodes"] == 100


def test_a_window_does_not_grow():
    """At most a hundred blocks, however long the run."""
    window = ReturnWindow()
    for _ in range(50):
        window.add(sums_of([[(1.0, 2)], []] * 50))
    assert len(window.state()["blocks"]) == 100
    assert window.total_episodes == 2500


def test_a_window_goes_on_after_json():
    """What a checkpoint keeps gives the same rows, then and later."""
    first, rng = ReturnWindow(), np.random.default_rng(0)
    first.add(sums_of([[(float(rng.normal()), 3)] * int(rng.integers(0, 20)) for _ in range(30)]))
    second = ReturnWindow()
    second.restore(json.loads(json.dumps(first.state())))
    assert second.row() == first.row()
    for window in (first, second):
        window.add(sums_of([[(5.0, 1)] * 30]))
    assert second.row() == first.row()


@pytest.mark.parametrize("mode, truncates", [("next-step", True), ("same-step", False)])
def test_returns_and_lengths_of_episodes_are_those_of_a_plain_loop(mode, truncates):
    """Both reset modes against sums over the time steps of the scripted environment, for 200 steps."""
    script = ((3, False), (1, truncates), (5, truncates), (2, False))
    batch = Batch(scripted.Scripted(script, truncates), mode)
    size, length = 4, 200
    state, _ = batch.init(jax.random.split(jax.random.key(0), size))

    def step(carry, key):
        state, episodes = carry
        action = jnp.zeros(size, jnp.int32)
        state, timestep = batch.step(state, action, jax.random.split(key, size))
        episodes, ended = episodes.add(timestep)
        return (state, episodes), (timestep, ended)

    keys = jax.random.split(jax.random.key(1), length)
    _, (timesteps, ended) = jax.jit(lambda c: jax.lax.scan(step, c, keys))((state, Episodes.start(size)))
    timesteps, ended = jax.device_get((timesteps, ended))
    wanted = []
    for b in range(size):
        total, steps = 0.0, 0
        for t in range(length):
            if timesteps.valid[t, b]:
                total, steps = total + timesteps.reward[t, b], steps + 1
            if timesteps.first[t, b]:
                wanted.append((t, b, total, steps))
                total, steps = 0.0, 0
    assert len(wanted) > 100
    assert int(ended.done.sum()) == len(wanted)
    for t, b, total, steps in wanted:
        assert ended.done[t, b]
        assert ended.returns[t, b] == pytest.approx(total, rel=1e-5)
        assert ended.lengths[t, b] == steps
        assert steps in {line[0] for line in script}


def test_sums_over_cores_are_the_sums_over_everything():
    """Eight cores, some without an ended episode, against numpy; without any, the extremes are infinite."""
    rng = np.random.default_rng(0)
    done = rng.random((3, 16)) < 0.3
    done[:, :4] = False
    returns, lengths = rng.normal(size=(3, 16)).astype(np.float32), rng.integers(1, 9, (3, 16))
    spec = jax.sharding.PartitionSpec(None, mesh.CORE)

    def over(ended):
        return EpisodeSums.of(ended).over_cores(mesh.CORE)

    cores = mesh.over_cores(over, mesh.make(8), (spec,), mesh.REPLICATED)
    for mask in (done, np.zeros_like(done)):
        sums = jax.jit(cores)(Ended(mask, returns, lengths, mask))
        assert float(sums.count) == mask.sum()
        np.testing.assert_allclose(sums.returns, returns[mask].sum(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(sums.lengths, lengths[mask].sum())
        assert float(sums.smallest) == returns[mask].min(initial=np.inf)
        assert float(sums.largest) == returns[mask].max(initial=-np.inf)
