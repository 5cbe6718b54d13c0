"""Policies against distrax's distributions, and what must hold at the edges of float32."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.networks.policies import ILLEGAL, mask_logits, policy
from podracer.specs import Continuous, Discrete, MultiDiscrete

distrax = pytest.importorskip("distrax")

BIG = Discrete(5), MultiDiscrete((3, 2, 4)), Continuous((-1.0, -2.0, -math.inf), (1.0, 3.0, math.inf))


def reference(action, numbers):
    """The same distribution as distrax has it; numbers lie side by side."""
    if isinstance(action, Discrete):
        return distrax.Categorical(logits=numbers)
    mean, log_std = numbers[..., : action.size], numbers[..., action.size :]
    return distrax.MultivariateNormalDiag(mean, jnp.exp(log_std))


def categoricals(action, numbers):
    ends = np.cumsum(action.num_values)[:-1]
    return [distrax.Categorical(logits=part) for part in np.split(np.asarray(numbers), ends, axis=-1)]


def some_numbers(action, seed=0, shape=(6, 7)):
    scale = 0.5 if isinstance(action, Continuous) else 2.0
    return scale * jax.random.normal(jax.random.key(seed), (*shape, policy(action).num_numbers))


@pytest.mark.loose_rank
@pytest.mark.parametrize("action", [Discrete(1), Discrete(2), Discrete(5), BIG[2]])
def test_log_prob_entropy_and_mode_are_those_of_distrax(action):
    numbers = some_numbers(action)
    ours, theirs = policy(action), reference(action, numbers)
    sample = ours.sample(jax.random.key(1), numbers)
    np.testing.assert_allclose(ours.log_prob(numbers, sample), theirs.log_prob(sample), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(ours.entropy(numbers), theirs.entropy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(ours.mode(numbers), theirs.mode())


@pytest.mark.loose_rank
def test_components_of_a_multi_discrete_action_are_independent_categoricals():
    action = BIG[1]
    numbers = some_numbers(action)
    ours, parts = policy(action), categoricals(action, numbers)
    sample = ours.sample(jax.random.key(1), numbers)
    assert (sample.shape, sample.dtype) == ((6, 7, 3), jnp.int32)
    log_prob = sum(part.log_prob(sample[..., i]) for i, part in enumerate(parts))
    np.testing.assert_allclose(ours.log_prob(numbers, sample), log_prob, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(ours.entropy(numbers), sum(part.entropy() for part in parts), rtol=1e-5)
    np.testing.assert_array_equal(ours.mode(numbers), np.stack([part.mode() for part in parts], -1))


@pytest.mark.loose_rank
@pytest.mark.parametrize("action", BIG)
def test_gradients_are_those_of_distrax(action):
    """Of log-probability and entropy with respect to what the network puts out."""
    numbers = some_numbers(action)
    sample = policy(action).sample(jax.random.key(1), numbers)

    def ours(numbers):
        return jnp.sum(policy(action).log_prob(numbers, sample) + 0.3 * policy(action).entropy(numbers))

    def theirs(numbers):
        if isinstance(action, MultiDiscrete):
            ends = np.cumsum(action.num_values)[:-1]
            parts = [distrax.Categorical(logits=part) for part in jnp.split(numbers, ends, axis=-1)]
            each = [part.log_prob(sample[..., i]) + 0.3 * part.entropy() for i, part in enumerate(parts)]
            return jnp.sum(sum(each))
        distribution = reference(action, numbers)
        return jnp.sum(distribution.log_prob(sample) + 0.3 * distribution.entropy())

    np.testing.assert_allclose(jax.grad(ours)(numbers), jax.grad(theirs)(numbers), rtol=1e-4, atol=1e-5)


def chi_square(counts, probabilities):
    """Pearson's statistic in units of its standard deviation; below 5 for any honest sampler."""
    expected = counts.sum() * probabilities
    degrees = (probabilities > 0).sum() - 1
    assert counts[probabilities == 0].sum() == 0
    statistic = ((counts - expected)[probabilities > 0] ** 2 / expected[probabilities > 0]).sum()
    return (statistic - degrees) / math.sqrt(2 * degrees)


PROBABILITIES = [
    (0.25, 0.25, 0.25, 0.25),
    (0.0, 0.7, 0.0, 0.2, 0.1, 0.0),
    (0.001, 0.009, 0.09, 0.9),
    (0.9, 0.09, 0.009, 0.001),
]


@pytest.mark.parametrize("probabilities", PROBABILITIES)
def test_sampled_frequencies_are_the_probabilities(probabilities):
    """Chi-square over 200 000 draws, drawn in one batch and drawn one key each."""
    probabilities = np.array(probabilities)
    with np.errstate(divide="ignore"):
        logits = jnp.asarray(np.where(probabilities > 0, np.log(probabilities) + 7.0, ILLEGAL), jnp.float32)
    sample, draws = policy(Discrete(len(probabilities))).sample, 200_000
    batch = sample(jax.random.key(3), jnp.broadcast_to(logits, (draws, logits.size)))
    single = jax.vmap(sample, (0, None))(jax.random.split(jax.random.key(4), draws), logits)
    for actions in (batch, single):
        counts = np.bincount(actions, minlength=logits.size)
        assert len(counts) == logits.size
        assert abs(chi_square(counts, probabilities)) < 5


def test_components_are_drawn_independently():
    """A table of two components, against the product of their probabilities."""
    one, two = np.array([0.5, 0.3, 0.2]), np.array([0.9, 0.1])
    logits = jnp.log(jnp.asarray(np.concatenate([one, two]), jnp.float32))
    sample = policy(MultiDiscrete((3, 2))).sample(jax.random.key(0), jnp.broadcast_to(logits, (100_000, 5)))
    table = np.bincount(np.asarray(sample[:, 0] * 2 + sample[:, 1]), minlength=6)
    assert abs(chi_square(table, np.outer(one, two).ravel())) < 5


def test_normal_samples_have_the_mean_and_deviation_that_the_network_says():
    numbers = jnp.asarray([1.0, -2.0, math.log(0.5), math.log(3.0)], jnp.float32)
    action = Continuous((-1.0, -1.0), (1.0, 1.0))
    sample = policy(action).sample(jax.random.key(0), jnp.broadcast_to(numbers, (100_000, 4)))
    np.testing.assert_allclose(sample.mean(0), [1.0, -2.0], atol=0.05)
    np.testing.assert_allclose(sample.std(0), [0.5, 3.0], rtol=0.02)
    np.testing.assert_allclose(np.corrcoef(np.asarray(sample).T)[0, 1], 0.0, atol=0.02)
    np.testing.assert_array_equal(policy(action).mode(numbers), [1.0, -2.0])


@pytest.mark.parametrize("size", [2, 7, 100])
@pytest.mark.parametrize("scale", [1.0, 80.0, 1e6])
def test_illegal_actions_are_never_chosen_and_have_no_probability(size, scale):
    """20 000 random masks and logits, also logits so large that most legal actions underflow."""
    rng = np.random.default_rng(size)
    rows = 20_000 if size < 100 else 2_000
    logits = jnp.asarray(rng.normal(size=(rows, size)) * scale, jnp.float32)
    mask = rng.random((rows, size)) < rng.random((rows, 1))
    mask[np.arange(rows), rng.integers(0, size, rows)] = True
    ours, masked = policy(Discrete(size)), mask_logits(logits, jnp.asarray(mask))
    for actions in (ours.sample(jax.random.key(0), masked), ours.mode(masked)):
        assert mask[np.arange(rows), np.asarray(actions)].all()
    log_probs = jax.vmap(ours.log_prob, (None, 1), 1)(masked, jnp.tile(jnp.arange(size), (rows, 1)))
    assert np.all(np.exp(log_probs)[~mask] == 0)
    np.testing.assert_allclose(np.exp(log_probs).sum(1), 1.0, rtol=1e-5)
    gradient = jax.grad(lambda x: jnp.sum(ours.entropy(mask_logits(x, jnp.asarray(mask)))))(logits)
    assert np.all(np.isfinite(gradient)) and np.all(np.asarray(gradient)[~mask] == 0)


@pytest.mark.parametrize("draw", [0.0, 1.0])
def test_the_ends_of_the_uniform_draw_choose_a_legal_action(draw, monkeypatch):
    """Illegal actions at either end: a draw of 0, and one so near 1 that the threshold rounds to the total."""
    monkeypatch.setattr(jax.random, "uniform", lambda key, shape: jnp.full(shape, draw, jnp.float32))
    rng = np.random.default_rng(0)
    mask = rng.random((5000, 6)) < 0.4
    mask[np.arange(5000), rng.integers(0, 6, 5000)] = True
    logits = mask_logits(jnp.asarray(rng.normal(size=mask.shape), jnp.float32), jnp.asarray(mask))
    actions = np.asarray(policy(Discrete(6)).sample(jax.random.key(0), logits))
    assert mask[np.arange(5000), actions].all()
    np.testing.assert_array_equal(actions, mask.argmax(1) if draw == 0 else 5 - mask[:, ::-1].argmax(1))


def test_prefix_sums_that_round_each_on_its_own_choose_no_illegal_action(monkeypatch):
    """On parallel hardware a prefix sum may step up or down where the weight is 0."""
    exact = jnp.cumsum
    wobble = jnp.asarray([0.0, 1e-2, -1e-2, 0.0, 1e-2, 0.0])
    monkeypatch.setattr(jnp, "cumsum", lambda x, axis: exact(x, axis) + jnp.broadcast_to(wobble, x.shape))
    logits = jnp.asarray([0.0, ILLEGAL, ILLEGAL, 0.0, ILLEGAL, 0.0])
    actions = policy(Discrete(6)).sample(jax.random.key(0), jnp.broadcast_to(logits, (5000, 6)))
    assert set(np.asarray(actions).tolist()) == {0, 3, 5}


@pytest.mark.parametrize("offset", [-1e30, -1e4, 1e4, 1e30, 3e38])
def test_only_differences_of_logits_matter(offset):
    """Logits whose exponentials, or whose sum, overflow."""
    ours = policy(Discrete(4))
    logits = jnp.full((1000, 4), offset, jnp.float32)
    assert set(np.asarray(ours.sample(jax.random.key(0), logits)).tolist()) == {0, 1, 2, 3}
    np.testing.assert_allclose(ours.log_prob(logits, jnp.zeros(1000, jnp.int32)), math.log(0.25), rtol=1e-6)
    np.testing.assert_allclose(ours.entropy(logits), math.log(4), rtol=1e-6)


def test_a_logit_far_below_the_others_is_an_action_that_is_not_taken():
    """Entropy and its gradient stay finite where a probability underflows to 0."""
    logits = jnp.asarray([[0.0, -1e30, 0.0], [0.0, -200.0, 0.0], [1e6, 0.0, -1e6]])
    ours = policy(Discrete(3))
    np.testing.assert_allclose(ours.entropy(logits), [math.log(2), math.log(2), 0.0], atol=1e-6)
    assert np.all(np.isfinite(jax.grad(lambda x: jnp.sum(ours.entropy(x)))(logits)))


def test_without_any_legal_action_something_is_chosen_all_the_same():
    """Games mark no action as legal where they are over; the choice there is ignored, but it must be an action."""
    ours, logits = policy(Discrete(3)), mask_logits(jnp.zeros((50, 3)), jnp.zeros((50, 3), bool))
    actions = ours.sample(jax.random.key(0), logits)
    assert set(np.asarray(actions).tolist()) <= {0, 1, 2}
    assert np.all(np.isfinite(ours.log_prob(logits, actions))) and np.all(np.isfinite(ours.entropy(logits)))


@pytest.mark.parametrize("action", BIG)
def test_numbers_may_have_any_leading_shape(action):
    """One step [P], a batch [B, P], a sequence [T, B, P]."""
    ours = policy(action)
    component = () if isinstance(action, Discrete) else (3,)
    for shape in ((), (4,), (3, 4)):
        numbers = some_numbers(action, shape=shape)
        sample = ours.sample(jax.random.key(0), numbers)
        assert sample.shape == ours.mode(numbers).shape == shape + component
        assert (
            sample.dtype == ours.mode(numbers).dtype == (jnp.float32 if isinstance(action, Continuous) else jnp.int32)
        )
        assert ours.log_prob(numbers, sample).shape == ours.entropy(numbers).shape == shape


def test_an_unknown_action_spec_is_refused():
    with pytest.raises(TypeError, match="no policy"):
        policy("discrete")
