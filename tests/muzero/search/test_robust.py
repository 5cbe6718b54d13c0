"""What a search does with illegal actions, broken models and wrong shapes, and where it runs."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import mctx
import numpy as np
import pytest

from muzero import search
from podracer import mesh
from podracer.errors import UserError
from tests.muzero.search import models

POLICIES = {
    "muzero": search.muzero_policy,
    "gumbel": search.gumbel_muzero_policy,
    "rounds": partial(search.gumbel_muzero_policy, mode="rounds"),
}
BATCH, ACTIONS, SIMS = 6, 5, 12


@pytest.fixture(scope="module", params=POLICIES)
def run(request):
    """A compiled search of tables: `(model, key, root, invalid, temperature)`."""
    policy = POLICIES[request.param]

    @mesh.compiled_quickly
    def compiled(model, key, root, invalid, temperature):
        more = {"temperature": temperature} if request.param == "muzero" else {}
        return policy(model, key, root, models.table_step, SIMS, invalid_actions=invalid, **more)

    def searched(model, root, invalid, key=0, temperature=1.0):
        model, invalid = jax.tree.map(jnp.asarray, (model, invalid))
        return compiled(model, jax.random.PRNGKey(key), root, invalid, jnp.float32(temperature))

    searched.programs = compiled._cache_size
    return searched


def all_finite(tree) -> bool:
    return all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating))


def test_invalid_actions_get_no_visits_and_no_weight(run):
    model = models.table(0, 30, ACTIONS)
    root = models.table_root(model, np.arange(BATCH))
    invalid = np.random.default_rng(0).random((BATCH, ACTIONS)) < 0.6
    invalid[0] = True  # nothing is legal: the row stays finite and harms no other
    invalid[1] = np.arange(ACTIONS) != 3
    output = run(model, root, invalid, temperature=100.0)
    visits = np.asarray(output.search_tree.summary().visit_counts)
    assert all_finite(output)
    some = ~invalid.all(1)
    assert np.all(visits[some][invalid[some]] == 0)
    assert np.all(np.asarray(output.action_weights)[some][invalid[some]] == 0)
    assert not np.any(invalid[some, np.asarray(output.action)[some]])
    assert output.action[1] == 3 and output.action_weights[1, 3] == 1
    np.testing.assert_allclose(np.sum(output.action_weights, axis=-1), 1, atol=1e-5)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_roots_without_any_legal_action_are_refused_by_number(policy):
    """Where the mask is known before the search is compiled; nothing is."""
    model = models.table(0, 30, ACTIONS)
    root = models.table_root(model, np.arange(BATCH))
    invalid = np.zeros((BATCH, ACTIONS), bool)
    invalid[[2, 4]] = True
    with pytest.raises(UserError, match="leaves no action to roots 2, 4; expected at least one"):
        policy(model, jax.random.PRNGKey(0), root, models.table_step, SIMS, invalid_actions=invalid)


@pytest.mark.parametrize("low", [-np.inf, np.finfo(np.float32).min, np.nan, np.inf])
def test_actions_are_illegal_where_the_model_says_so(run, low):
    model = models.table(1, 30, ACTIONS)
    illegal = np.random.default_rng(1).random((30, ACTIONS)) < 0.5
    illegal[np.arange(30), np.arange(30) % ACTIONS] = False
    model = model._replace(logits=np.where(illegal, low, model.logits).astype(np.float32))
    root = models.table_root(model, np.arange(BATCH))
    output = run(model, root, np.zeros((BATCH, ACTIONS), bool))  # at the root, too, logits alone say so
    tree = output.search_tree
    assert all_finite(output)
    at = np.asarray(tree.per_tree(tree.embeddings["state"]))
    assert np.all(np.asarray(tree.children_visits)[illegal[at]] == 0)


def test_a_model_that_returns_nan_leaves_the_tree_finite(run):
    model = models.table(2, 30, ACTIONS)
    model.value[::3], model.reward[::2, 0], model.reward[1::2, 1], model.logits[::5] = np.nan, np.inf, -np.inf, np.nan
    model.logits[1::5, 2] = np.inf
    output = run(model, models.table_root(model, np.arange(BATCH)), np.zeros((BATCH, ACTIONS), bool))
    tree = output.search_tree._replace(embeddings=())  # the model's own, which we do not touch
    assert all_finite((output.action_weights, tree))


@pytest.mark.parametrize("field", ["value", "reward", "discount", "logits", "one logit"])
def test_the_simulation_in_which_the_model_fails_is_reported(run, field):
    """State 7 is broken. From root 0 everything leads there, from the others nothing does."""
    model = models.table(2, 30, ACTIONS)
    model.following[np.isin(model.following, (0, 7))] = 10
    model.following[0] = 7
    if field == "one logit":
        model.logits[7, 1] = np.inf
    elif field in ("value", "logits"):
        getattr(model, field)[7] = np.nan
    else:
        getattr(model, field)[0] = np.inf
    valid, roots = np.zeros((BATCH, ACTIONS), bool), np.arange(BATCH)
    found = run(model, models.table_root(model, roots), valid).search_tree.summary().nonfinite_at
    np.testing.assert_array_equal(found, [1, *[-1] * (BATCH - 1)])
    model.value[3] = np.nan
    model.following[2] = 3
    found = run(model, models.table_root(model, roots), valid).search_tree.summary().nonfinite_at
    np.testing.assert_array_equal(np.asarray(found)[[0, 2, 3]], [1, 1, 0])


def test_what_the_model_says_of_actions_that_nobody_takes_is_no_fault(run):
    """Rounds have lanes for illegal actions, too, whatever the model says of them."""
    model = models.table(4, 30, ACTIONS)
    model.reward[:, 3] = np.nan
    model.logits[:, 3] = -np.inf
    invalid = np.zeros((BATCH, ACTIONS), bool)
    invalid[:, 3] = True
    summary = run(model, models.table_root(model, np.arange(BATCH)), invalid).search_tree.summary()
    assert np.all(summary.visit_counts[:, 3] == 0)
    np.testing.assert_array_equal(summary.nonfinite_at, -1)


def test_same_shapes_compile_once(run):
    model = models.table(3, 30, ACTIONS)
    for key in (1, 2):
        run(model, models.table_root(model, np.arange(BATCH)), np.zeros((BATCH, ACTIONS), bool), key)
    assert run.programs() == 1


def test_dirichlet_noise_falls_on_legal_actions_only():
    """A uniform prior, all noise: with 2 legal actions of 20, its share stays what was asked for."""
    batch, actions = 64, 20
    invalid = np.ones((batch, actions), bool)
    invalid[:, [3, 11]] = False
    root = mctx.RootFnOutput(
        prior_logits=jnp.zeros((batch, actions)), value=jnp.zeros(batch), embedding=jnp.zeros((batch, 1))
    )

    def prior(over):
        policy = partial(search.muzero_policy, recurrent_fn=models.network_step, num_simulations=1, dirichlet_over=over)
        run = mesh.compiled_quickly(lambda *args, **more: policy(*args, **more).search_tree.children_prior_logits[:, 0])
        logits = run(models.network(0, actions, 1), jax.random.PRNGKey(0), root, invalid_actions=jnp.asarray(invalid))
        return np.exp(logits)[:, [3, 11]]

    legal = prior("legal")
    np.testing.assert_allclose(legal.sum(1), 1, atol=1e-5)
    assert abs(legal[:, 0].std() - 0.25 * np.sqrt(1 / 4 / 1.6)) < 0.02  # of Beta(.3, .3): 1 / (4 * (2 * .3 + 1))
    assert np.all(legal >= 0.75 / 2 - 1e-5)


def test_nim_is_played_perfectly():
    """One to three stones; who takes the last wins. Two players (discount -1), an end (discount 0), illegal moves."""
    stones = np.arange(13)
    after = np.maximum(stones[:, None] - [1, 2, 3], 0)
    legal = stones[:, None] >= [1, 2, 3]
    wins = legal & (after == 0)
    model = models.Table(
        after.astype(np.int32),
        np.where(wins, 1.0, 0.0).astype(np.float32),
        np.where(wins, 0.0, -1.0).astype(np.float32),
        np.where(legal, 0.0, -np.inf).astype(np.float32),
        np.zeros(13, np.float32),
    )
    start = np.array([1, 2, 3, 5, 6, 7, 9, 10])
    root = models.table_root(model, start)
    policy = partial(search.muzero_policy, recurrent_fn=models.table_step, num_simulations=300, dirichlet_fraction=0.0)
    run = mesh.compiled_quickly(lambda *args: policy(*args, temperature=0.0).action)
    action = run(jax.tree.map(jnp.asarray, model), jax.random.PRNGKey(0), root)
    np.testing.assert_array_equal(action + 1, start % 4)


def test_the_value_of_a_decision_process_and_its_best_action_are_found():
    """All sequences of three decisions, by exhaustion and by PUCT with a prior and values that know nothing."""
    model, depth, width = tree_of_decisions(depth=3, width=3)
    best = np.zeros(model.value.size)
    for state in reversed(range((width**depth - 1) // (width - 1))):
        best[state] = np.max(model.reward[state] + model.discount[state] * best[model.following[state]])
    root = models.table_root(model, np.arange(4))  # the whole problem, and what is left after each first decision
    policy = partial(search.muzero_policy, recurrent_fn=models.table_step, num_simulations=4000, temperature=0.0)
    run = mesh.compiled_quickly(lambda model, key: policy(model, key, root, dirichlet_fraction=0.0))
    output = run(jax.tree.map(jnp.asarray, model), jax.random.PRNGKey(0))
    summary = output.search_tree.summary()
    wanted = model.reward[:4] + model.discount[:4] * best[model.following[:4]]
    np.testing.assert_allclose(np.take_along_axis(wanted, np.asarray(output.action)[:, None], 1)[:, 0], best[:4])
    np.testing.assert_allclose(summary.value, best[:4], rtol=0.03)
    assert np.all(np.asarray(summary.value) <= best[:4] + 1e-5)


def tree_of_decisions(depth, width):
    """A table whose states are the sequences of up to `depth` decisions; the last ones are terminal."""
    inner = (width**depth - 1) // (width - 1)
    model = models.table(5, inner + width**depth, width)
    following = np.arange(model.value.size)[:, None] * width + 1 + np.arange(width)
    last = following[:, 0] > inner - 1
    discount = np.where(last[:, None], 0.0, model.discount).astype(np.float32)
    following = np.minimum(following, model.value.size - 1).astype(np.int32)
    reward = np.random.default_rng(5).integers(0, 4, following.shape).astype(np.float32)
    nothing = {"logits": 0 * model.logits, "value": 0 * model.value}
    return model._replace(following=following, discount=discount, reward=reward, **nothing), depth, width


def test_terminal_roots_harm_no_other(run):
    """From state 7 everything leads back to itself, for nothing and for ever; the others find what they find alone."""
    model = models.table(6, 30, ACTIONS)
    model.following[7], model.reward[7], model.discount[7], model.value[7] = 7, 0.0, 0.0, 0.0
    valid = np.zeros((BATCH, ACTIONS), bool)
    alone = run(model, models.table_root(model, np.arange(10, 10 + BATCH)), valid)
    states = np.arange(10, 10 + BATCH)
    states[[1, 4]] = 7
    mixed = run(model, models.table_root(model, states), valid)
    assert all_finite(mixed)
    np.testing.assert_array_equal(mixed.search_tree.summary().value[np.array([1, 4])], 0.0)
    others = np.array([0, 2, 3, 5])
    np.testing.assert_array_equal(mixed.action_weights[others], alone.action_weights[others])
    np.testing.assert_array_equal(mixed.search_tree.summary().value[others], alone.search_tree.summary().value[others])


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_half_precision_models_have_float32_statistics(policy):
    weights = jax.tree.map(lambda x: x.astype(jnp.bfloat16), models.network(0, 4))
    root = jax.tree.map(lambda x: x.astype(jnp.bfloat16), models.network_root(weights, 0, 3))

    def step(weights, key, action, embedding):
        output, state = models.network_step(weights, key, action, embedding)
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), (output, state))

    searched = mesh.compiled_quickly(partial(policy, recurrent_fn=step, num_simulations=6))
    output = searched(weights, jax.random.PRNGKey(0), root)
    assert output.search_tree.rows.dtype == output.action_weights.dtype == jnp.float32
    assert all_finite((output.action_weights, output.search_tree.rows, output.search_tree.root))
    np.testing.assert_array_equal(output.search_tree.summary().visit_counts.sum(1), 6)
    assert output.search_tree.embeddings.dtype == jnp.bfloat16


def test_each_core_searches_its_own_batch():
    cores = mesh.make(2)
    weights, key = models.network(0, 3), jax.random.PRNGKey(0)
    root = models.network_root(weights, 0, 4)

    def policy(root):
        return search.gumbel_muzero_policy(weights, key, root, models.network_step, 8).action_weights

    sharded = jax.jit(mesh.over_cores(policy, cores, mesh.SHARDED, mesh.SHARDED))(root)
    halves = [jax.jit(policy)(jax.tree.map(lambda x, i=i: x[2 * i : 2 * i + 2], root)) for i in (0, 1)]
    np.testing.assert_allclose(sharded, jnp.concatenate(halves), atol=1e-6)


def wrong(field, value):
    def step(*args):
        output, state = models.network_step(*args)
        return output.replace(**{field: value(getattr(output, field))}), state

    return step


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (wrong("reward", lambda x: x[:, None]), ["reward", "float32[3, 1]", "[3]"]),
        (wrong("discount", lambda x: jnp.ones(x.shape, jnp.int32)), ["discount", "int32[3]", "floats"]),
        (wrong("prior_logits", lambda x: x[:, :-1]), ["prior_logits", "[3, 3]", "[3, 4]"]),
        (wrong("value", lambda x: x.mean()), ["value", "float32[]", "[3]"]),
        (lambda *args: models.network_step(*args)[0], ["pair"]),
        (lambda *args: (models.network_step(*args)[0], {"h": 0.0}), ["embedding", "structure"]),
        (lambda *args: (models.network_step(*args)[0], jnp.zeros((3, 9))), ["embedding", "[3, 9]", "[3, 8]"]),
        (lambda *args: ({"reward": 1}, args[3]), ["no field", "prior_logits"]),
    ],
)
def test_a_wrong_model_is_named(step, words):
    weights = models.network(0, 4)
    root = models.network_root(weights, 0, 3)
    search.check_recurrent_fn(models.network_step, weights, root)
    for check in (
        lambda: search.check_recurrent_fn(step, weights, root),
        lambda: jax.eval_shape(lambda: search.muzero_policy(weights, jax.random.PRNGKey(0), root, step, 4)),
    ):
        with pytest.raises(UserError) as error:
            check()
        assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_simulations": 0}, ["num_simulations"]),
        ({"max_depth": 0}, ["max_depth"]),
        ({"invalid_actions": np.zeros((3, 3))}, ["invalid_actions", "[3, 3]", "[3, 4]"]),
        ({"mode": "parallel"}, ["mode", "parallel", "rounds"]),
        ({"max_num_considered_actions": 0}, ["max_num_considered_actions"]),
        ({"root": models.network_root(models.network(0, 4), 0, 3).replace(value=jnp.zeros((3, 1)))}, ["root: value"]),
        (
            {"root": models.network_root(models.network(0, 4), 0, 3).replace(embedding=jnp.zeros(2))},
            ["root: embedding"],
        ),
    ],
)
def test_wrong_arguments_are_named(change, words):
    weights = models.network(0, 4)
    settings = {"root": models.network_root(weights, 0, 3), "num_simulations": 4} | change
    with pytest.raises(UserError) as error:
        search.gumbel_muzero_policy(weights, jax.random.PRNGKey(0), recurrent_fn=models.network_step, **settings)
    assert all(word in str(error.value) for word in words), error.value


def of_two_plies(**changes):
    """`(weights, root, decision_fn, chance_fn)`; `decision` or `chance` change what that function returns."""
    weights = models.two_plies(0, 4, 3)
    decision, chance = changes.get("decision", lambda x: x), changes.get("chance", lambda x: x)
    return (
        weights,
        models.network_root(weights, 0, 3),
        lambda *args: decision(models.decision_step(*args)),
        lambda *args: chance(models.chance_step(*args)),
    )


def with_field(field, change):
    return lambda result: (result[0].replace(**{field: change(getattr(result[0], field))}), result[1])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"decision": lambda result: result[0]}, ["decision_recurrent_fn", "pair"]),
        ({"decision": lambda result: ({"chance_logits": 1}, result[1])}, ["decision_recurrent_fn", "no field"]),
        ({"decision": with_field("chance_logits", lambda x: x[0])}, ["chance_logits", "float32[3]", "[3, 3]"]),
        ({"decision": with_field("afterstate_value", lambda x: x[:, None])}, ["afterstate_value", "[3, 1]"]),
        ({"chance": lambda result: result[0]}, ["chance_recurrent_fn", "pair"]),
        ({"chance": with_field("action_logits", lambda x: x[:, :2])}, ["action_logits", "[3, 2]", "[3, 4]"]),
    ],
)
def test_a_wrong_model_of_two_plies_is_named(change, words):
    weights, root, *functions = of_two_plies(**change)
    with pytest.raises(UserError) as error:
        jax.eval_shape(lambda: search.stochastic_muzero_policy(weights, jax.random.PRNGKey(0), root, *functions, 4))
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("change", "at"),
    [
        ({"decision": with_field("afterstate_value", lambda x: x * jnp.nan)}, 1),
        ({"decision": with_field("chance_logits", lambda x: x.at[:, 1].set(jnp.inf))}, 1),
        ({"chance": with_field("value", lambda x: x * jnp.inf)}, 2),
        ({"chance": with_field("action_logits", lambda x: x * jnp.nan)}, 2),
        ({}, -1),
    ],
)
def test_the_half_step_in_which_a_model_of_two_plies_fails_is_reported(change, at):
    """The first simulation ends in an afterstate, one of the next in a state."""
    weights, root, *functions = of_two_plies(**change)
    policy = partial(search.stochastic_muzero_policy, num_simulations=8)
    output = mesh.compiled_quickly(lambda key: policy(weights, key, root, *functions))(jax.random.PRNGKey(0))
    assert all_finite((output.action_weights, output.search_tree.rows, output.search_tree.root))
    found = np.asarray(output.search_tree.summary().nonfinite_at)
    assert np.all(found == at) if at < 2 else np.all((found >= 2) & (found <= 8))
