"""The shared update: optimizers, annealing, masked means, minibatches, gradients that are not finite."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from podracer import learning, mesh

WEIGHTS = {"a": jnp.asarray([1.0, -2.0]), "b": jnp.asarray([[0.5]])}


def quadratic(weights):
    """Gradient: the weights themselves; at (1, -2, 0.5) its norm is sqrt(5.25)."""
    loss = 0.5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(weights))
    return loss, {"first": weights["a"][0]}


def take_steps(rule, count, loss=quadratic, rate=0.1, weights=WEIGHTS):
    step = jax.jit(lambda learner: learning.gradient_step(loss, learner, rule, rate, None))
    learner = learning.Learner(weights, rule.init(weights))
    for _ in range(count):
        learner, metrics = step(learner)
    return learner, metrics


REFERENCES = {
    "adam": lambda: optax.adam(0.1, eps=0.03),
    "radam": lambda: optax.radam(0.1, eps=0.03),
    "rmsprop": lambda: optax.rmsprop(0.1, decay=0.99, eps=0.03, eps_in_sqrt=False),
    "sgd": lambda: optax.sgd(0.1),
}


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize("name", REFERENCES)
def test_ten_steps_are_those_of_optax_leaf_by_leaf(name, max_grad_norm):
    """Handling all leaves as one vector, and applying the rate outside, changes nothing."""
    learner, _ = take_steps(learning.optimizer(name, max_grad_norm, 0.03), 10)
    clip = [] if max_grad_norm is None else [optax.clip_by_global_norm(max_grad_norm)]
    reference = optax.chain(*clip, REFERENCES[name]())
    weights, state = WEIGHTS, reference.init(WEIGHTS)
    for _ in range(10):
        updates, state = reference.update(weights, state, weights)
        weights = optax.apply_updates(weights, updates)
    # radam's rectification is a difference of large numbers, which compiled code rounds differently.
    rtol = 1e-3 if name == "radam" else 1e-4
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-5), learner.weights, weights)


def test_metrics_are_those_before_the_step():
    """Loss 0.5 * 5.25 and gradient norm sqrt(5.25), worked by hand; the gradient norm is the one before clipping."""
    _, metrics = take_steps(learning.optimizer("sgd", 0.5, 1e-5), 1)
    assert metrics["loss"] == pytest.approx(2.625)
    assert metrics["gradient_norm"] == pytest.approx(5.25**0.5)
    assert metrics["first"] == 1.0 and metrics["nonfinite_updates"] == 0.0


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("name", REFERENCES)
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(name, bad):
    """Neither weights nor optimizer state move, even if one of a hundred components is bad; the next step is sound."""
    rule = learning.optimizer(name, 0.5, 1e-5)
    learner, _ = take_steps(rule, 3)

    def loss(weights, number):
        return quadratic(weights)[0] + number * weights["a"][1], {}

    step = jax.jit(lambda learner, number: learning.gradient_step(lambda w: loss(w, number), learner, rule, 0.1, None))
    after, metrics = step(learner, bad)
    assert metrics["nonfinite_updates"] == 1.0
    jax.tree.map(np.testing.assert_array_equal, after, learner)
    sound, metrics = step(after, 0.0)
    assert metrics["nonfinite_updates"] == 0.0
    wanted, _ = take_steps(rule, 4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), sound.weights, wanted.weights)


def test_annealing_falls_linearly_to_zero_and_stays_there():
    """10 decisions per update over 40 decisions: 4 updates at 1, 3/4, 1/2, 1/4 of the rate, then none."""
    rates = [learning.anneal(0.8, jnp.asarray(updates), 10, 40) for updates in range(6)]
    np.testing.assert_allclose(rates, [0.8, 0.6, 0.4, 0.2, 0.0, 0.0], rtol=1e-6)
    assert learning.anneal(0.8, jnp.asarray(10**6), 10, None) == pytest.approx(0.8)
    assert learning.anneal(0.8, jnp.asarray(3), 10, 40).dtype == jnp.float32
    # More decisions than an int32 holds.
    assert learning.anneal(1.0, jnp.asarray(10**6), 10**4, 2 * 10**10) == pytest.approx(0.5)


@pytest.mark.parametrize("num_cores", [1, 2, 8])
def test_weighted_sums_average_over_the_unmasked_steps_of_all_cores(num_cores):
    """Masks spread unevenly: one core has a single valid step, one has none."""
    rng = np.random.default_rng(0)
    values, mask = rng.normal(size=(8, 6)).astype(np.float32), rng.random((8, 6)) < 0.5
    mask[0], mask[1] = False, np.arange(6) == 3

    def mean(values, mask, axis):
        return mesh.mean(jnp.sum(learning.mean_weights(mask, axis) * values), axis)

    if num_cores == 1:
        got = mean(jnp.asarray(values), jnp.asarray(mask), None)
    else:
        function = functools.partial(mean, axis=mesh.CORE)
        got = mesh.over_cores(function, mesh.make(num_cores), (mesh.SHARDED,) * 2, mesh.REPLICATED)(values, mask)
    np.testing.assert_allclose(got, values[mask].mean(), rtol=1e-5)


def test_a_batch_without_valid_steps_has_weights_of_zero():
    np.testing.assert_array_equal(learning.mean_weights(jnp.zeros((3, 2), bool), None), np.zeros((3, 2)))


T, N, MINIBATCHES, EPOCHS = 2, 12, 3, 4


@functools.partial(jax.jit, static_argnames=("epochs", "minibatches"))
def epochs_of(batch, key, epochs=EPOCHS, minibatches=MINIBATCHES):
    """Which samples each step saw, recorded in the weights [epochs * minibatches, T, N / minibatches, ...]."""

    def step(learner, minibatch, statistics):
        place = learner.opt_state
        weights = jax.tree.map(lambda seen, now: seen.at[place].set(now), learner.weights, (minibatch, statistics))
        bad = (place == 1) | (place == 5)
        metrics = {"place": place.astype(jnp.float32), "nonfinite_updates": bad.astype(jnp.float32)}
        return learning.Learner(weights, place + 1), metrics

    def statistics(minibatch):
        return jnp.sum(minibatch["id"])

    steps = epochs * minibatches
    shapes = jax.tree.map(lambda x: jnp.zeros((steps, x.shape[0], x.shape[1] // minibatches, *x.shape[2:])), batch)
    learner = learning.Learner((shapes, jnp.zeros(steps)), jnp.zeros((), jnp.int32))
    return learning.minibatch_epochs(step, learner, batch, statistics, key, epochs, minibatches)


def numbered():
    """Sample (t, n) is numbered t * N + n; its other leaf repeats the number, so that mix-ups show."""
    number = jnp.arange(T * N, dtype=jnp.float32).reshape(T, N)
    return {"id": number, "pair": jnp.stack([number, -number], -1)}


def test_every_epoch_uses_every_sample_once_in_an_order_of_its_own():
    """Columns of time stay together, leaves stay aligned, orders differ between epochs and keys."""
    learner, _ = epochs_of(numbered(), jax.random.key(0))
    (seen, statistics), steps = learner
    assert steps == EPOCHS * MINIBATCHES
    ids = np.asarray(seen["id"])
    np.testing.assert_array_equal(ids[:, 1], ids[:, 0] + N)
    np.testing.assert_array_equal(seen["pair"], np.stack([ids, -ids], -1))
    np.testing.assert_allclose(statistics, ids.sum((1, 2)))
    orders = ids[:, 0].reshape(EPOCHS, N)
    np.testing.assert_array_equal(np.sort(orders, 1), np.tile(np.arange(N), (EPOCHS, 1)))
    other, _ = epochs_of(numbered(), jax.random.key(1))
    orders = [*orders, *np.asarray(other.weights[0]["id"])[:, 0].reshape(EPOCHS, N)]
    assert len({tuple(order) for order in orders}) == 2 * EPOCHS


def test_metrics_are_averaged_over_the_steps_and_skipped_steps_are_summed():
    _, metrics = epochs_of(numbered(), jax.random.key(0))
    assert metrics["place"] == pytest.approx(np.arange(EPOCHS * MINIBATCHES).mean())
    assert metrics["nonfinite_updates"] == 2.0


def test_one_epoch_of_one_minibatch_is_the_whole_batch():
    learner, _ = epochs_of(numbered(), jax.random.key(0), 1, 1)
    np.testing.assert_array_equal(np.sort(np.asarray(learner.weights[0]["id"][0]), 1), numbered()["id"])


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000, 4097])
def test_a_permutation_has_every_number_once(size):
    """Sizes that are and are not powers of two; with as many keys as a run has epochs."""
    orders = jax.jit(jax.vmap(lambda key: learning.permutation(key, size)))(jax.random.split(jax.random.key(size), 20))
    assert orders.dtype == jnp.int32
    np.testing.assert_array_equal(np.sort(orders, 1), np.tile(np.arange(size), (20, 1)))


@pytest.mark.parametrize("size", [4, 5])
def test_all_permutations_are_equally_likely(size):
    """Chi-square over all orders of a few samples: 60 000 keys, within 5 deviations."""
    keys = jax.random.split(jax.random.key(0), 60_000)
    orders = np.asarray(jax.jit(jax.vmap(lambda key: learning.permutation(key, size)))(keys))
    _, counts = np.unique(orders @ size ** np.arange(size), return_counts=True)
    number = math.factorial(size)
    assert len(counts) == number
    expected = len(keys) / number
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert abs(statistic - (number - 1)) < 5 * math.sqrt(2 * (number - 1))


def test_two_samples_share_a_minibatch_as_often_as_chance_says():
    """Of 32 samples in 4 minibatches: neighbours, samples half the batch apart, and any two, with 20 000 keys."""
    keys = jax.random.split(jax.random.key(1), 20_000)
    orders = np.asarray(jax.jit(jax.vmap(lambda key: learning.permutation(key, 32)))(keys))
    place = np.argsort(orders, 1) // 8
    together = (place[:, :, None] == place[:, None, :]).mean(0)[np.triu_indices(32, 1)]
    chance = 7 / 31
    deviation = math.sqrt(chance * (1 - chance) / len(keys))
    assert np.abs(together - chance).max() < 5 * deviation
