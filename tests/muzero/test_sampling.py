"""Samples of actions and what is made of them: statistics, duplicates, masks, losses, and whole searches."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import muzero
from muzero import planning
from muzero.model import Heads
from muzero.planning import Planner
from muzero.sampling import Sampled, Sampler, imitation
from muzero.support import Support
from podracer.errors import UserError
from podracer.networks.functional import functional
from podracer.networks.policies import policy
from podracer.specs import Continuous, Discrete, MultiDiscrete
from tests.contracts.agents import SPECS, Bench, T, disturbed, fast_jit, observations

pytestmark = pytest.mark.loose_rank  # mctx broadcasts arrays of different rank

PLANE = Continuous((-1.0, -1.0), (1.0, np.inf))
LOGITS = jnp.log(jnp.asarray([0.4, 0.25, 0.2, 0.1, 0.05]))


def softmax(logits):
    logits = np.asarray(logits, np.float64)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize("explore", [0.0, 0.5])
def test_the_corrected_prior_is_the_policy_on_average(explore):
    """Importance sampling: sum of prior x f over the sample is near E_pi f, whatever the proposal was."""
    number, f = 400, np.array([3.0, -1.0, 2.0, 7.0, -5.0])
    sampler = Sampler(Discrete(500), number)
    logits = jnp.concatenate([LOGITS, jnp.full(495, -6.0)])  # some mass on many more actions
    values = np.concatenate([f, np.zeros(495)])
    drawn = sampler.draw(jax.random.key(0), jnp.broadcast_to(logits[None], (64, 500)), explore=explore)
    found = (softmax(drawn.logits) * values[np.asarray(drawn.actions)]).sum(-1)
    wanted = (softmax(logits) * values).sum()
    assert abs(found.mean() - wanted) < 4 * found.std() / 8 + 0.02
    assert 0.01 < found.std() < 1.0  # a sample, not the sum itself


def test_a_wider_proposal_is_undone_for_continuous_actions():
    """Drawn half from a standard normal, weighted: the mean and variance of the network's narrow normal."""
    numbers = jnp.asarray([[0.5, -0.3, np.log(0.3), np.log(0.2)]])
    drawn = Sampler(PLANE, 20_000).draw(jax.random.key(1), numbers, explore=0.5)
    weights, actions = softmax(drawn.logits)[0], np.asarray(drawn.actions[0])
    assert actions.std(0).min() > 0.6  # wide as drawn
    mean = weights @ actions
    np.testing.assert_allclose(mean, [0.5, -0.3], atol=0.02)
    np.testing.assert_allclose(np.sqrt(weights @ (actions - mean) ** 2), [0.3, 0.2], atol=0.02)


@pytest.mark.parametrize("explore", [0.0, 0.3])
@pytest.mark.parametrize(("action", "size"), [(Discrete(5), 5), (MultiDiscrete((2, 3)), 5)])
def test_equal_actions_are_one_edge(action, size, explore):
    """Against a loop: the first of its kind is legal and has the prior of all of them."""
    sampler, rng = Sampler(action, 4), np.random.default_rng(0)
    numbers = jnp.asarray(rng.normal(size=(32, size)), jnp.float32)
    drawn = jax.device_get(sampler.draw(jax.random.key(2), numbers, explore=explore))
    pi = policy(action)
    merged = 0
    for row in range(32):
        seen = {}
        for i in range(4):
            key = tuple(np.atleast_1d(drawn.actions[row, i]).tolist())
            assert drawn.legal[row, i] == (key not in seen)
            seen[key] = [*seen.get(key, []), i]
        merged += len(seen) < 4
        for key, places in seen.items():
            given = jnp.asarray(key, jnp.int32) if isinstance(action, MultiDiscrete) else jnp.asarray(key[0])
            prob, wide = (float(jnp.exp(pi.log_prob(n, given))) for n in (numbers[row], jnp.zeros(size)))
            wanted = np.log(len(places) * prob / ((1 - explore) * prob + explore * wide))
            assert drawn.logits[row, places[0]] == pytest.approx(wanted, abs=1e-4)
            assert np.all(drawn.logits[row, places[1:]] <= -1e30)
    assert merged > 5


@pytest.mark.parametrize("explore", [0.0, 0.5])
def test_illegal_actions_are_never_sampled(explore):
    legal = jnp.broadcast_to(jnp.asarray([False, True, False, True, True])[None], (16, 5))
    numbers = jnp.broadcast_to(LOGITS[None], (16, 5))
    for number in (4, 5):
        drawn = Sampler(Discrete(5), number).draw(jax.random.key(3), numbers, legal, explore, with_mode=True)
        taken = np.asarray(drawn.actions)[np.asarray(drawn.legal)]
        assert set(taken.tolist()) == {1, 3, 4}
        if number == 4:
            assert np.all(drawn.actions[:, 0] == 1)  # the most likely of the legal ones


def test_small_spaces_are_enumerated():
    assert Sampler(Discrete(4), 4).every.tolist() == [0, 1, 2, 3]
    assert Sampler(MultiDiscrete((2, 3)), 6).every.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert Sampler(MultiDiscrete((2, 3)), 5).every is None and Sampler(PLANE, 5).every is None
    assert (Sampler(Discrete(4), 9).edges, Sampler(Discrete(4), 3).edges, Sampler(PLANE, 7).edges) == (4, 3, 7)


@pytest.mark.parametrize("kind", ["discrete", "multi-discrete", "continuous"])
def test_the_policy_loss_is_the_weighted_likelihood(kind):
    """-sum w log pi(a), in numpy; and with all actions as candidates it is the ordinary cross-entropy."""
    rng, action = np.random.default_rng(0), SPECS[kind].action
    sizes = {"discrete": (4,), "multi-discrete": (2, 3)}.get(kind)
    numbers = rng.normal(size=(2, 3, sum(sizes) if sizes else 4)).astype(np.float32)
    weights = rng.dirichlet(np.ones(6), (2, 3)).astype(np.float32)
    if sizes is None:
        actions = rng.normal(size=(2, 3, 6, 2)).astype(np.float32)
        mean, log_std = numbers[..., None, :2], numbers[..., None, 2:]
        density = np.exp(-0.5 * ((actions - mean) / np.exp(log_std)) ** 2) / (np.exp(log_std) * np.sqrt(2 * np.pi))
        log_probs = np.log(density).sum(-1)
    else:
        parts = np.stack([rng.integers(0, size, (2, 3, 6)) for size in sizes], -1)
        ends = np.cumsum((0, *sizes))
        tables = [np.log(softmax(numbers[..., a:b])) for a, b in itertools.pairwise(ends)]
        log_probs = sum(np.take_along_axis(table, parts[..., i], -1) for i, table in enumerate(tables))
        actions = parts if kind == "multi-discrete" else parts[..., 0]
    found = imitation(policy(action), Sampled(jnp.asarray(weights), jnp.asarray(actions)), jnp.asarray(numbers))
    np.testing.assert_allclose(found, -(weights * log_probs).sum(-1), rtol=1e-4)
    if kind == "discrete":
        whole = Sampled(jnp.asarray(weights[..., :4]), jnp.broadcast_to(jnp.arange(4), (2, 3, 4)))
        plain = imitation(policy(action), whole.weights, jnp.asarray(numbers))
        np.testing.assert_allclose(imitation(policy(action), whole, jnp.asarray(numbers)), plain, rtol=1e-5)


@functools.cache
def planner_of(kind):
    heads = Heads(11, 11)
    network = functional(lambda rngs: muzero.network(8, 1, 8)(SPECS[kind], heads, rngs))
    actions = policy(SPECS[kind].action)
    params = network.init(jax.random.key(0))
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(5), len(leaves))
    noisy = [leaf + 0.5 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys)]
    return Planner(network, Support(20.0, 11), Support(5.0, 11), 0.9, actions), jax.tree.unflatten(structure, noisy)


@pytest.mark.parametrize("rule", ["gumbel", "puct"])
def test_a_sample_of_all_actions_is_the_ordinary_search(rule):
    """Same actions, weights and values, with a mask and noise, because the edges are the same."""
    planner, weights = planner_of("discrete")
    few = {"num_simulations": 12}
    ordinary = {"gumbel": planning.gumbel_search, "puct": planning.muzero_search}[rule]
    config = {"gumbel": muzero.GumbelConfig, "puct": muzero.Config}[rule](**few)
    sampled = planning.sampled_search(
        muzero.SampledConfig(rule=rule, num_samples=4, **few), Sampler(SPECS["discrete"].action, 4)
    )
    seen = observations(SPECS["discrete"].observation, (16,), 1)
    legal = jnp.asarray(np.random.default_rng(0).random((16, 4)) < 0.6).at[:, 1].set(True)
    key, acting = jax.random.key(7), jnp.int32(3)
    one = fast_jit(lambda: sampled(planner, weights, seen, legal, key, acting))()
    other = fast_jit(lambda: ordinary(config)(planner, weights, seen, legal, jax.random.split(key)[1], acting))()
    np.testing.assert_array_equal(one.action, other.action)
    np.testing.assert_allclose(one.policy.weights, other.policy, atol=1e-5)
    np.testing.assert_allclose(one.value, other.value, rtol=1e-4, atol=1e-5)
    assert len(set(np.asarray(one.action).tolist())) > 1


def test_the_search_takes_one_of_its_samples_and_greedy_plans_repeat():
    planner, weights = planner_of("continuous")
    config = muzero.SampledConfig(num_samples=5, num_simulations=8, exploration_fraction=0.5)
    search = planning.sampled_search(config, Sampler(SPECS["continuous"].action, 5))
    seen = observations(SPECS["continuous"].observation, (16,), 1)
    plan = fast_jit(lambda key, acting: search(planner, weights, seen, None, key, acting), static_argnums=1)
    one, two, acted = plan(jax.random.key(0), None), plan(jax.random.key(1), None), plan(jax.random.key(0), 0)
    for found in (one, acted):
        assert found.policy.actions.shape == (16, 5, 2) and found.action.shape == (16, 2)
        assert np.all((found.policy.actions == found.action[:, None]).all(-1).any(-1))
        np.testing.assert_allclose(found.policy.weights.sum(-1), 1, rtol=1e-5)
    np.testing.assert_array_equal(one.action, two.action)
    mode = planner.actions.mode(planning.root_of(planner, weights, seen).prior_logits)
    np.testing.assert_allclose(one.policy.actions[:, 0], mode, rtol=1e-5)
    assert np.any(acted.policy.actions != one.policy.actions)


def test_the_memory_keeps_the_samples_and_reanalysis_draws_anew():
    small = {"num_simulations": 4, "num_samples": 3, "unroll_steps": 2, "sequence_length": T, "replay_steps": 16 * T}
    small |= {"min_replay": 16 * T, "batch_size": 8, "reanalysed": 8}
    agent = muzero.sampled_muzero(SPECS["continuous"], muzero.SampledConfig(**small), muzero.network(8, 1, 8))
    it = Bench(agent, SPECS["continuous"])
    state = it.init(jax.random.key(0))
    trajectory, _ = it.unroll(disturbed(state.params), 0)
    after, metrics = it.learn(state, trajectory, jax.random.key(0))
    noted, stored = trajectory.actor_output, after.memory.sequences
    valid = np.asarray(trajectory.timestep.valid[1:]).T
    for kept, given in ((stored.policy.actions, noted.extras.policy.actions), (stored.action, noted.action)):
        np.testing.assert_array_equal(np.asarray(kept)[valid], np.swapaxes(np.asarray(given), 0, 1)[valid])
    # All starts are searched again, with samples of their own: what the actor noted has no influence.
    policy = noted.extras.policy
    other = policy._replace(actions=policy.actions + 1, weights=jnp.flip(policy.weights, -1))
    changed = noted._replace(extras=noted.extras._replace(policy=other, value=noted.extras.value + 3))
    again, _ = it.learn(state, trajectory._replace(actor_output=changed), jax.random.key(0))
    assert metrics["gradient_steps"] > 0
    jax.tree.map(np.testing.assert_array_equal, after.params, again.params)


def test_what_cannot_be_is_refused_in_one_line():
    with pytest.raises(UserError, match=r"num_samples is 0; expected .*>= 1"):
        muzero.SampledConfig(num_samples=0)
    with pytest.raises(UserError, match=r"exploration_fraction is 1; expected"):
        muzero.SampledConfig(exploration_fraction=1.0)
    with pytest.raises(UserError, match=r"search is rounds and rule puct"):
        muzero.SampledConfig(rule="puct", search="rounds")
    with pytest.raises(UserError, match=r"unknown rule 'gumble'.*Did you mean 'gumbel'"):
        muzero.SampledConfig(rule="gumble")
