"""The loss of an unroll against numpy, step by step, and where its gradients stop."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muzero.loss import Costs, halved, loss
from muzero.model import Heads, network
from muzero.planning import Planner
from muzero.support import Support
from muzero.targets import Targets
from podracer.networks.functional import functional
from podracer.networks.policies import policy
from tests.contracts.agents import SPECS, fast_jit, observations

K, B, A = 3, 6, 4
SPEC, HEADS = SPECS["discrete"], Heads(9, 7, projection=True)
NET = functional(lambda rngs: network(8, 1, 8)(SPEC, HEADS, rngs))
PLANNER = Planner(NET, Support(5.0, 9), Support(2.0, 7), 0.9, policy(SPEC.action))
WEIGHTS = jax.tree.map(
    lambda leaf: leaf + 0.1 * jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape), NET.init(jax.random.key(0))
)


def example(seed=0):
    rng = np.random.default_rng(seed)
    mask = lambda *shape: jnp.asarray(rng.random(shape) < 0.6)
    normal = lambda *shape: jnp.asarray(3 * rng.normal(size=shape), jnp.float32)
    targets = Targets(
        normal(K + 1, B),
        jnp.asarray(rng.dirichlet(np.ones(A), (K + 1, B)), jnp.float32),
        normal(K, B),
        jnp.asarray(rng.integers(0, A, (K, B)), jnp.int32),
        mask(K + 1, B),
        mask(K + 1, B),
        mask(K, B),
    )
    weight = jnp.asarray(rng.random(B), jnp.float32)
    return (
        observations(SPEC.observation, (B,), seed),
        observations(SPEC.observation, (K, B), 50 + seed),
        targets,
        weight,
    )


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def two_hot(x, limit, bins):
    h = lambda x: np.sign(x) * (np.sqrt(np.abs(x) + 1) - 1) + 1e-3 * x
    y = np.clip(h(x), -h(limit), h(limit))
    grid = np.linspace(-h(limit), h(limit), bins)
    return np.stack([np.interp(y, grid, row) for row in np.eye(bins)], -1)


def by_hand(observation, following, targets, weight, costs):
    """Sum over environments and steps, with the network called one step at a time."""
    apply = lambda function, *args: NET.apply(WEIGHTS, function, *args)
    latent, total, parts = (
        apply(lambda m, x: m.represent(x), observation),
        0.0,
        {"p": 0.0, "v": 0.0, "r": 0.0, "c": 0.0},
    )
    for k in range(K + 1):
        scale = np.asarray(weight, np.float64) / (1 if k == 0 else K)
        if k:
            latent, reward = apply(lambda m, x, a: m.step(x, a), latent, targets.action[k - 1])
            cost = -(two_hot(np.asarray(targets.reward[k - 1]), 2.0, 7) * log_softmax(reward)).sum(-1)
            parts["r"] += (scale * cost * np.asarray(targets.reward_mask[k - 1])).sum()
            ours = np.asarray(apply(lambda m, x: m.project(x, True), latent), np.float64)
            theirs = apply(lambda m, x: m.project(m.represent(x), False), following[k - 1])
            unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
            cost = -(unit(ours) * unit(np.asarray(theirs, np.float64))).sum(-1)
            parts["c"] += (scale * cost * np.asarray(targets.policy_mask[k])).sum()
        seen = apply(lambda m, x: m.predict(x), latent)
        cost = -(np.asarray(targets.policy[k]) * log_softmax(seen.policy)).sum(-1)
        parts["p"] += (scale * cost * np.asarray(targets.policy_mask[k])).sum()
        cost = -(two_hot(np.asarray(targets.value[k]), 5.0, 9) * log_softmax(seen.value)).sum(-1)
        parts["v"] += (scale * cost * np.asarray(targets.value_mask[k])).sum()
    total = parts["p"] + costs.value * parts["v"] + costs.reward * parts["r"]
    return total + (costs.consistency or 0.0) * parts["c"], parts


@pytest.mark.parametrize("costs", [Costs(0.25, 1.0), Costs(0.5, 2.0, 3.0)])
def test_the_loss_is_the_sum_over_a_walk(costs):
    observation, following, targets, weight = example()
    run = fast_jit(lambda w: loss(PLANNER, w, observation, following, targets, weight, costs))
    found, metrics = run(WEIGHTS)
    wanted, parts = by_hand(observation, following, targets, weight, costs)
    assert float(found) == pytest.approx(wanted, rel=1e-4)
    names = {"policy_loss": "p", "value_loss": "v", "reward_loss": "r"}
    names |= {} if costs.consistency is None else {"consistency_loss": "c"}
    for name, key in names.items():
        assert float(metrics[name]) == pytest.approx(parts[key], rel=1e-4), name
    clipped = np.abs(np.asarray(targets.value)) > 5
    mask = np.asarray(targets.value_mask)
    assert (
        float(metrics["value_clipped"]) == pytest.approx((clipped & mask).sum() / mask.sum()) and (clipped & mask).any()
    )
    policy = np.asarray(targets.policy[0], np.float64)
    entropy = -(policy * np.log(policy)).sum(-1) * np.asarray(weight) * np.asarray(targets.policy_mask[0])
    assert float(metrics["target_entropy"]) == pytest.approx(entropy.sum(), rel=1e-4)
    assert metrics["start_value"].shape == (B,)


def test_the_entropy_is_that_over_the_legal_actions():
    """By hand; without a mask over all. No gradient of it flows into what is not there."""
    observation, _, targets, weight = example()
    legal = np.random.default_rng(3).random((K + 1, B, A)) < 0.6
    legal[..., 0] = True
    costs = Costs(0.25, 1.0)
    for mask in (legal, None):

        @fast_jit
        def bonus(weights, mask=mask):
            with_, without = (
                loss(PLANNER, weights, observation, None, targets, weight, each, mask)
                for each in (costs._replace(entropy=1.0), costs)
            )
            return without[0] - with_[0], with_[1]["policy_entropy"]

        latent, wanted = NET.apply(WEIGHTS, lambda m, x: m.represent(x), observation), []
        for k in range(K + 1):
            if k:
                latent, _ = NET.apply(WEIGHTS, lambda m, x, a: m.step(x, a), latent, targets.action[k - 1])
            logits = np.asarray(NET.apply(WEIGHTS, lambda m, x: m.predict(x), latent).policy, np.float64)
            there = np.ones((B, A), bool) if mask is None else mask[k]
            odds = np.where(there, np.exp(logits), 0.0)
            probs = odds / odds.sum(-1, keepdims=True)
            entropy = -(probs * np.log(np.where(there, probs, 1.0))).sum(-1)
            wanted.append((entropy * np.asarray(weight) * np.asarray(targets.policy_mask[k])).sum() / (K if k else 1))
        found, at_start = bonus(WEIGHTS)
        assert float(found) == pytest.approx(sum(wanted), rel=1e-3)
        assert float(at_start) == pytest.approx(wanted[0], rel=1e-4)


def test_masked_targets_have_no_influence():
    observation, following, targets, weight = example()
    noisy = targets._replace(
        value=jnp.where(targets.value_mask, targets.value, 1e6),
        reward=jnp.where(targets.reward_mask, targets.reward, -1e6),
        policy=jnp.where(targets.policy_mask[..., None], targets.policy, 7.0),
    )
    costs = Costs(0.5, 2.0, 3.0)
    run = fast_jit(jax.value_and_grad(lambda w, t: loss(PLANNER, w, observation, following, t, weight, costs)[0]))
    jax.tree.map(np.testing.assert_array_equal, run(WEIGHTS, targets), run(WEIGHTS, noisy))


def test_half_of_the_gradient_passes_into_the_dynamics_at_each_step():
    """The latent goes through as it is; after K steps 1 / 2^K of the gradient is left."""
    x = jnp.array([0.3, -2.0])
    np.testing.assert_array_equal(halved(x), x)
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(halved(halved(halved(x))) * 8))(x), [1.0, 1.0])
    # The whole unroll: the last reward's gradient with respect to the representation, with and without halving.
    observation, _, targets, weight = example()
    targets = targets._replace(
        value_mask=jnp.zeros((K + 1, B), bool),
        policy_mask=jnp.zeros((K + 1, B), bool),
        reward_mask=jnp.zeros((K, B), bool).at[-1].set(True),
    )

    def plain(weights):
        def run(module):
            latent = module.represent(observation)
            for k in range(K):
                latent, reward = module.step(latent, targets.action[k])
            return (
                -jnp.sum(weight * jnp.sum(PLANNER.reward.two_hot(targets.reward[-1]) * jax.nn.log_softmax(reward), -1))
                / K
            )

        return NET.apply(weights, run)

    ours = fast_jit(jax.grad(lambda w: loss(PLANNER, w, observation, None, targets, weight, Costs(0.0, 1.0))[0]))(
        WEIGHTS
    )
    whole = fast_jit(jax.grad(plain))(WEIGHTS)
    representation = lambda tree: jax.tree.leaves(tree["body"]["representation"])
    for halved_gradient, gradient in zip(representation(ours), representation(whole), strict=True):
        np.testing.assert_allclose(halved_gradient * 2**K, gradient, rtol=1e-3, atol=1e-6)
    assert any(np.any(leaf != 0) for leaf in representation(whole))


def test_no_gradient_flows_into_the_observations_that_came():
    """The consistency loss pulls the dynamics, not its target."""
    observation, following, targets, weight = example()
    targets = targets._replace(policy_mask=jnp.ones((K + 1, B), bool))

    def total(following):
        return loss(PLANNER, WEIGHTS, observation, following, targets, weight, Costs(0.25, 1.0, 2.0))[0]

    value, gradient = fast_jit(jax.value_and_grad(total))(following)
    np.testing.assert_array_equal(gradient, 0.0)
    assert float(fast_jit(total)(following + 1.0)) != float(value)
