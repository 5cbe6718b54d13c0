"""The invertible transform, two-hot targets and what a head's logits say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muzero.support import EPSILON, Support, cross_entropy, inverse, transform

NUMBERS = np.concatenate([[0.0], *[sign * np.logspace(-6, 5, 45) for sign in (-1, 1)]])


def h(x):
    """The paper's form, in double precision."""
    return np.sign(x) * (np.sqrt(np.abs(x) + 1) - 1) + EPSILON * x


def test_the_transform_is_the_papers():
    np.testing.assert_allclose(transform(jnp.asarray(NUMBERS, jnp.float32)), h(NUMBERS), rtol=2e-6)


def test_the_transform_and_its_inverse_go_round():
    x = jnp.asarray(NUMBERS, jnp.float32)
    np.testing.assert_allclose(inverse(transform(x)), NUMBERS, rtol=3e-5, atol=1e-6)
    y = jnp.linspace(-300, 300, 601)
    np.testing.assert_allclose(transform(inverse(y)), y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("support", [Support(1000.0, 101), Support(1.0, 3), Support(7.5, 21)])
def test_two_hot_puts_the_mean_where_the_number_is(support):
    """Against a loop: two neighbours at most, weights by distance, ends clipped."""
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(-1.5, 1.5, 50) * support.limit, [0.0, support.limit, -support.limit, 1e9, -1e9]])
    x = x.astype(np.float32)
    found = np.asarray(support.two_hot(jnp.asarray(x)))
    bins = np.linspace(-h(support.limit), h(support.limit), support.bins)
    for row, number in zip(found, x, strict=True):
        y = np.clip(h(np.float64(number)), bins[0], bins[-1])
        wanted, low = np.zeros(support.bins), min(int(np.searchsorted(bins, y, "right")) - 1, support.bins - 2)
        share = (y - bins[low]) / (bins[low + 1] - bins[low])
        wanted[low], wanted[low + 1] = 1 - share, share
        np.testing.assert_allclose(row, wanted, atol=2e-5)
    np.testing.assert_allclose(found.sum(-1), 1.0, rtol=1e-5)
    inside = np.clip(x, -support.limit, support.limit)
    said = support.mean(jnp.log(jnp.asarray(found) + 1e-20))
    np.testing.assert_allclose(said, inside, rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(support.clipped(jnp.asarray(x)), np.abs(x) > np.float32(support.limit))


def test_equal_logits_say_zero():
    assert float(Support(50.0, 11).mean(jnp.zeros((1, 11)))[0]) == pytest.approx(0.0, abs=1e-6)


def test_cross_entropy_is_finite_where_a_target_is_0():
    target, logits = jnp.array([[0.0, 1.0, 0.0]]), jnp.array([[-1e9, 0.0, 50.0]])
    value, gradient = jax.value_and_grad(lambda x: jnp.sum(cross_entropy(target, x)))(logits)
    assert float(value) == pytest.approx(50.0) and np.all(np.isfinite(gradient))
