"""Running moments against numpy's over all the data at once."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import mesh, normalise

EXAMPLE = {"a": np.zeros(3, np.float32), "b": np.zeros((2, 2), np.uint8), "c": np.zeros((), np.float32)}


def batches(seed, count, batch_size):
    """Batches of unequal lengths and masks, whose mean and spread drift; some have nothing, or one row, to count."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        shape = (int(rng.integers(1, 4)), batch_size)
        mask = rng.random(shape) < rng.random()
        if i % 5 == 0:
            mask[:] = False
            mask.flat[0] = i % 10 == 0
        values = {
            "a": (rng.normal(size=(*shape, 3)) * (1 + i) + 50 * i).astype(np.float32),
            "b": rng.integers(0, 255, (*shape, 2, 2)).astype(np.uint8),
            "c": rng.normal(size=shape).astype(np.float32),
        }
        # What is masked out may be anything.
        values["c"][~mask] = np.nan
        yield values, mask


@functools.cache
def updater(num_cores):
    if num_cores == 1:
        return jax.jit(functools.partial(normalise.update, axis_name=None))
    specs = (mesh.REPLICATED, mesh.SHARDED, mesh.SHARDED)
    function = functools.partial(normalise.update, axis_name=mesh.CORE)
    lead = lambda tree: jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), tree)
    inner = lambda moments, values, mask: function(moments, lead(values), lead(mask))
    over = mesh.over_cores(inner, mesh.make(num_cores), specs, mesh.REPLICATED)
    return jax.jit(lambda moments, values, mask: over(moments, lead(values), lead(mask)))


@pytest.mark.parametrize("num_cores", [1, 8])
def test_moments_are_those_of_all_unmasked_data_at_once(num_cores):
    """Over 12 unequal batches, on one core and spread over eight."""
    moments, seen, masks = normalise.initial(EXAMPLE), [], []
    for values, mask in batches(0, 12, 16):
        moments = updater(num_cores)(moments, values, mask)
        seen.append({name: leaf[mask].astype(np.float64) for name, leaf in values.items()})
        masks.append(mask)
    assert moments.count == sum(mask.sum() for mask in masks)
    for name in EXAMPLE:
        data = np.concatenate([batch[name] for batch in seen])
        np.testing.assert_allclose(moments.mean[name], data.mean(0), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(moments.square[name], data.var(0), rtol=1e-4)


def test_without_data_nothing_is_changed():
    """Before the first batch, and after one that is masked entirely."""
    moments = normalise.initial(EXAMPLE)
    values = {"a": jnp.ones((2, 4, 3)), "b": jnp.ones((2, 4, 2, 2), jnp.uint8), "c": jnp.full((2, 4), jnp.nan)}
    after = updater(1)(moments, values, jnp.zeros((2, 4), bool))
    for each in (moments, after):
        seen = normalise.normalise(each, {**values, "c": jnp.ones((2, 4)), "b": jnp.full((2, 4, 2, 2), 255, jnp.uint8)})
        for leaf in jax.tree.leaves(seen):
            np.testing.assert_allclose(leaf, 1.0, rtol=1e-6)
        assert normalise.scale(normalise.Moments(each.count, each.mean["c"], each.square["c"])) == pytest.approx(1.0)


def test_normalised_data_have_mean_0_and_deviation_1_and_outliers_are_clipped():
    values = 7 + 3 * jax.random.normal(jax.random.key(0), (50, 40))
    moments = normalise.update(normalise.initial(np.zeros(())), values, jnp.ones((50, 40), bool), None)
    seen = normalise.normalise(moments, values)
    np.testing.assert_allclose((seen.mean(), seen.std()), (0, 1), atol=1e-3)
    np.testing.assert_allclose(normalise.normalise(moments, jnp.asarray([1e9, -1e9])), [10, -10])
    np.testing.assert_allclose(normalise.scale(moments), 1 / np.std(values), rtol=1e-4)


def test_one_bad_number_does_not_spoil_the_statistics_for_ever():
    """A batch with NaN or infinity in it is left out: what acts with these moments must go on."""
    moments = normalise.update(
        normalise.initial(np.zeros(())), jnp.arange(6.0).reshape(2, 3), jnp.ones((2, 3), bool), None
    )
    for bad in (jnp.nan, jnp.inf, 3e38):
        values = jnp.asarray([[1.0, bad, 2.0]])
        after = normalise.update(moments, values, jnp.ones((1, 3), bool), None)
        jax.tree.map(np.testing.assert_array_equal, after, moments)


def test_bytes_begin_between_0_and_1():
    """Before there are data; clipping raw bytes at 10 standard deviations would leave two shades of a picture."""
    picture = jnp.arange(256, dtype=jnp.uint8).reshape(1, 16, 16)
    moments = normalise.initial(picture[0])
    np.testing.assert_allclose(normalise.normalise(moments, picture), picture / 255.0, rtol=1e-6)
