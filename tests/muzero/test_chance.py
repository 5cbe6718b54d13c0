"""Stochastic MuZero's own parts: codes, losses against numpy, and searches whose answer is known exactly."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import muzero
from muzero import chance, planning, search
from muzero.loss import Costs, loss
from muzero.model import Heads
from muzero.planning import Planner
from muzero.support import Support
from muzero.targets import Targets
from podracer.errors import UserError
from podracer.networks.functional import functional
from podracer.networks.policies import policy
from tests.contracts.agents import SPECS, fast_jit, observations
from tests.muzero.dice import Dice
from tests.muzero.test_loss import log_softmax, two_hot

pytestmark = pytest.mark.loose_rank  # mctx broadcasts arrays of different rank

K, B, A, M = 2, 6, 4, 5
SPEC, HEADS = SPECS["discrete"], Heads(9, 7, outcomes=M)
NET = functional(lambda rngs: muzero.network(8, 1, 8)(SPEC, HEADS, rngs))
PLANNER = Planner(NET, Support(5.0, 9), Support(2.0, 7), 0.9, policy(SPEC.action), M)
WEIGHTS = jax.tree.map(
    lambda leaf: leaf + 0.1 * jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape), NET.init(jax.random.key(0))
)


def example(seed=0):
    """Observations and targets; the first environments' episodes go on, the others end somewhere."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(3 * rng.normal(size=shape), jnp.float32)
    alive = np.ones((K + 1, B), bool)
    alive[2:, 3], alive[1:, 4], alive[:, 5] = False, False, False
    targets = Targets(
        normal(K + 1, B),
        jnp.asarray(rng.dirichlet(np.ones(A), (K + 1, B)), jnp.float32),
        normal(K, B),
        jnp.asarray(rng.integers(0, A, (K, B)), jnp.int32),
        jnp.ones((K + 1, B), bool),
        jnp.asarray(alive),
        jnp.ones((K, B), bool),
    )
    weight = jnp.asarray(rng.random(B), jnp.float32)
    return observations(SPEC.observation, (B,), seed), observations(SPEC.observation, (K, B), 9), targets, weight


def apply(name, *args):
    return NET.apply(WEIGHTS, lambda module, *given: getattr(module, name)(*given), *args)


def by_hand(observation, following, targets, weight, costs):
    """The network called one step at a time, its outcomes chosen by argmax over numbers made standard by numpy."""
    seen = [apply("represent", each) for each in (observation, *following)]
    alive, weight = np.asarray(targets.policy_mask), np.asarray(weight, np.float64)
    numbers = np.stack([np.asarray(apply("encode", *seen[k : k + 2]), np.float64) for k in range(K)])
    real = numbers[alive[:-1]]
    numbers = (numbers - real.mean(0)) / np.sqrt(real.var(0) + 1e-6)
    code, latent = np.eye(M)[numbers.argmax(-1)], seen[0]
    parts = dict.fromkeys(("p", "v", "r", "o", "a", "c"), 0.0)
    value = two_hot(np.asarray(targets.value), 5.0, 9)
    for k in range(K + 1):
        scale = weight / (1 if k == 0 else K)
        if k:
            here = scale * alive[k - 1]
            after, said = apply("afterstate", latent, targets.action[k - 1])
            latent, reward = apply("happen", after, jnp.asarray(code[k - 1], jnp.float32))
            parts["o"] += (here * -(code[k - 1] * log_softmax(said.outcome)).sum(-1)).sum()
            parts["a"] += (scale * -(value[k - 1] * log_softmax(said.value)).sum(-1)).sum()
            parts["c"] += (here * ((numbers[k - 1] - code[k - 1]) ** 2).sum(-1)).sum()
            parts["r"] += (
                scale * -(two_hot(np.asarray(targets.reward[k - 1]), 2.0, 7) * log_softmax(reward)).sum(-1)
            ).sum()
        found = apply("predict", latent)
        parts["p"] += (scale * alive[k] * -(np.asarray(targets.policy[k]) * log_softmax(found.policy)).sum(-1)).sum()
        parts["v"] += (scale * -(value[k] * log_softmax(found.value)).sum(-1)).sum()
    total = parts["p"] + costs.value * (parts["v"] + parts["a"]) + costs.reward * parts["r"]
    return total + costs.outcome * parts["o"] + costs.commitment * parts["c"], parts


def test_the_loss_is_the_sum_over_a_walk():
    costs = Costs(0.25, 1.5, outcome=0.7, commitment=0.3)
    observation, following, targets, weight = example()
    run = fast_jit(
        jax.value_and_grad(lambda w: loss(PLANNER, w, observation, following, targets, weight, costs), has_aux=True)
    )
    (found, metrics), gradient = run(WEIGHTS)
    wanted, parts = by_hand(observation, following, targets, weight, costs)
    names = {"policy_loss": "p", "value_loss": "v", "reward_loss": "r"}
    for name, part in (names | {"outcome_loss": "o", "afterstate_loss": "a", "commitment_loss": "c"}).items():
        assert float(metrics[name]) == pytest.approx(parts[part], rel=1e-3), name
    assert float(found) == pytest.approx(wanted, rel=1e-3)
    # Every part of the network learns; the encoder, too, whose codes are chosen by an argmax.
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert np.any(np.asarray(leaf) != 0), path


def test_what_is_observed_after_an_end_teaches_the_encoder_nothing():
    """Another episode's observation after the ends changes no probability of an outcome that was real."""
    observation, following, targets, weight = example()
    dead = ~np.asarray(targets.policy_mask[:-1])
    other = jnp.where(jnp.asarray(dead)[..., None], following + 3.0, following)
    costs = Costs(0.0, 0.0, outcome=1.0, commitment=1.0)
    targets = targets._replace(value_mask=jnp.zeros_like(targets.value_mask))
    run = fast_jit(lambda seen: loss(PLANNER, WEIGHTS, observation, seen, targets, weight, costs)[1])
    one, two = run(following), run(other)
    assert dead.any() and float(jnp.abs(other - following).max()) > 1
    for name in ("outcome_loss", "commitment_loss", "outcomes_used"):
        assert float(one[name]) == pytest.approx(float(two[name]), rel=1e-5), name


def test_codes_are_one_hot_and_pass_their_gradient_through():
    numbers = jnp.asarray([[0.1, 0.9, -0.3], [2.0, 1.0, 0.0]])
    np.testing.assert_allclose(chance.code_of(numbers), [[0, 1, 0], [1, 0, 0]], atol=1e-6)
    pull = jnp.asarray([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(pull * chance.code_of(x)))(numbers), pull)
    # The commitment moves the encoder alone, and the outcome's probabilities alone learn of its choice.
    said = chance.Afterstate(jnp.zeros((1, 2, 3)), jnp.zeros((1, 2, 3)))
    run = lambda x: chance.losses(chance.Chance(said, chance.code_of(x), x), jnp.ones((1, 2, 3)) / 3)
    slope = jax.grad(lambda x: run(x)["commitment_loss"].sum())(numbers[None])[0]
    np.testing.assert_allclose(slope, 2 * (numbers - jnp.eye(3)[jnp.asarray([1, 0])]), rtol=1e-5)
    assert not np.any(jax.grad(lambda x: run(x)["outcome_loss"].sum())(numbers[None]))


def test_no_code_is_the_greatest_everywhere():
    """Numbers that hardly differ, with one always ahead: made standard, all are used; masked ones do not count."""
    rng = np.random.default_rng(0)
    numbers = 1e-2 * rng.normal(size=(4, 64, 8)) + np.arange(8)
    mask = rng.random((4, 64)) < 0.5
    numbers[~mask] *= 100
    used = lambda x: float(chance.outcomes_used(chance.code_of(x), jnp.asarray(mask)))
    given = jnp.asarray(numbers, jnp.float32)
    found = chance.spread(given, jnp.asarray(mask))
    np.testing.assert_allclose(np.asarray(found)[mask].mean(0), 0, atol=1e-2)
    np.testing.assert_allclose(np.asarray(found)[mask].std(0), 1, atol=5e-2)
    assert used(given) == pytest.approx(1.0) and used(found) > 6


# Two actions in state 0: the die (two outcomes of 0.7 and 0.3 that lead to states 1 and 2), or safety (state 3).
PROBS = jnp.asarray([[0.7, 0.3], [1.0, 0.0]])
NEXT = jnp.asarray([[1, 2], [3, 3]])
# What the next action earns there: in state 1 the first is right, in state 2 the second.
REWARD = jnp.asarray([[0.0, 0.0], [1.0, -1.0], [-1.0, 1.0], [0.25, 0.25], [0.0, 0.0]])


def _tabular(num_simulations):
    """A search over the exact model: states 0 to 3, then the end, 4; afterstates are (state, action)."""

    def decide(params, key, action, state):
        first = (state == 0)[:, None]
        probs = jnp.where(first, PROBS[action], jnp.asarray([[1.0, 0.0]]))
        logits = jnp.log(jnp.maximum(probs, 1e-9))
        return search.DecisionRecurrentFnOutput(chance_logits=logits, afterstate_value=jnp.zeros(action.shape)), (
            state,
            action,
        )

    def happen(params, key, outcome, after):
        state, action = after
        following = jnp.where(state == 0, NEXT[action, outcome], 4)
        zeros = jnp.zeros(outcome.shape)
        output = search.ChanceRecurrentFnOutput(
            action_logits=jnp.zeros((*outcome.shape, 2)), value=zeros, reward=REWARD[state, action], discount=zeros + 1
        )
        return output, following

    root = search.RootFnOutput(prior_logits=jnp.zeros((1, 2)), value=jnp.zeros(1), embedding=jnp.zeros(1, jnp.int32))
    scale = functools.partial(search.qtransform_by_min_max, min_value=-1.0, max_value=1.0)
    key = jax.random.key(0)
    return search.stochastic_muzero_policy(
        (), key, root, decide, happen, num_simulations, dirichlet_fraction=0.0, qtransform=scale
    )


def test_a_search_with_chance_converges_to_the_exact_value():
    """Rolling is worth 1, as the player answers what came; without chance in the tree it would be worth 0.4 at best."""
    errors = []
    for number in (20, 600):
        output = fast_jit(lambda number=number: _tabular(number))()
        summary = output.search_tree.summary()
        errors.append(abs(float(summary.qvalues[0, 0]) - 1.0))
    assert int(jnp.argmax(output.action_weights[0])) == 0
    assert errors[1] < 0.12 and errors[1] < errors[0] / 2
    assert float(summary.qvalues[0, 1]) == pytest.approx(0.25, abs=0.1)
    tree = output.search_tree
    rolled = int(tree.children_index[0, 0, 0])
    visits = np.asarray(tree.children_visits[0, rolled, :2])
    np.testing.assert_allclose(visits / visits.sum(), PROBS[0], atol=0.02)


def test_the_planner_asks_the_network_in_halves():
    """One step in the tree is the network's afterstate and the one-hot outcome that was asked for."""
    decide, happen = planning.two_plies_of(PLANNER)
    latent = apply("represent", observations(SPEC.observation, (B,), 0))
    action, outcome = jnp.arange(B) % A, jnp.arange(B) % M
    first, after = decide(WEIGHTS, None, action, latent)
    second, following = happen(WEIGHTS, None, outcome, after)
    wanted_after, said = apply("afterstate", latent, action)
    wanted, reward = apply("happen", wanted_after, jnp.eye(M)[outcome])
    np.testing.assert_allclose(after, wanted_after, rtol=1e-5)
    np.testing.assert_allclose(following, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(first.chance_logits, said.outcome, rtol=1e-5)
    np.testing.assert_allclose(first.afterstate_value, PLANNER.value.mean(said.value), rtol=1e-5)
    np.testing.assert_allclose(second.reward, PLANNER.reward.mean(reward), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(second.discount, 0.9)


def test_the_die_is_a_game_as_told():
    env = Dice()
    start, _ = env.reset(jax.random.key(0))
    step = jax.jit(env.step)
    safe = step(start, jnp.int32(0), jax.random.key(1))[1]
    assert float(safe.reward) == 0.25 and bool(safe.terminated)
    shown = set()
    for seed in range(20):
        rolled, out = step(start, jnp.int32(2), jax.random.key(seed))
        assert float(out.reward) == 0 and not bool(out.terminated)
        shown.add(int(rolled.shown))
        for guess in range(4):
            end = step(rolled, jnp.int32(guess), jax.random.key(0))[1]
            assert float(end.reward) == (1 if guess == int(rolled.shown) else -1) and bool(end.terminated)
    assert shown == {0, 1, 2, 3}


def test_what_cannot_be_is_refused_in_one_line():
    for kind in ("continuous", "multi-discrete"):
        with pytest.raises(UserError, match=f"stochastic-muzero cannot drive {kind}.*expected Discrete"):
            muzero.stochastic_muzero(SPECS[kind])
    with pytest.raises(UserError, match=r"num_outcomes is 0; expected .*>= 1"):
        muzero.StochasticConfig(num_outcomes=0)
    with pytest.raises(UserError, match=r"commitment_cost is -1; expected"):
        muzero.StochasticConfig(commitment_cost=-1.0)
