"""The searches against mctx's, tree by tree: equal actions, weights, values and visits.

Everything that can be an argument is one (the model, the mask, the key), so that one compiled pair sees many cases.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import mctx
import numpy as np
import pytest

from muzero import search
from podracer import mesh
from tests.muzero.search import models

pytestmark = pytest.mark.loose_rank


def both(name: str, *args, **options):
    """Our policy and mctx's, compiled, as functions of (model, key, root, invalid)."""
    exact = {} if name.startswith("gumbel") else {"dirichlet_over": "all"}
    theirs = dict(options)
    if "qtransform" in options:  # by name, with its options
        transform, settings = options["qtransform"]
        options["qtransform"] = partial(getattr(search, transform), **settings)
        theirs["qtransform"] = partial(getattr(mctx, transform), **settings)
    ours = partial(getattr(search, name), **options, **exact)
    theirs = partial(getattr(mctx, name), **theirs)

    def compiled(policy):
        def run(model, key, root, invalid):
            output = policy(model, key, root, *args, invalid_actions=invalid)
            summary = output.search_tree.summary()
            return output.action, output.action_weights, summary.visit_counts, summary.value, summary.qvalues

        return mesh.compiled_quickly(run)

    return compiled(ours), compiled(theirs)


def assert_equal(pair, model, key, root, invalid):
    ours, theirs = (jax.device_get(run(model, key, root, invalid)) for run in pair)
    np.testing.assert_array_equal(ours[0], theirs[0])
    np.testing.assert_array_equal(ours[2], theirs[2])
    for got, expected in zip((ours[1], *ours[3:]), (theirs[1], *theirs[3:]), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6, rtol=1e-6)
    assert np.all(np.isfinite(ours[1]))


def masks(seed: int, batch: int, actions: int):
    """Nothing invalid; half; all but one; all but one or everything."""
    rng = np.random.default_rng(seed)
    none, half = np.zeros((batch, actions), bool), rng.random((batch, actions)) < 0.5
    one = np.ones((batch, actions), bool)
    one[np.arange(batch), rng.integers(0, actions, batch)] = False
    mixed = one | (np.arange(batch)[:, None] % 2 == 0)
    return [jnp.asarray(mask) for mask in (none, half, one, mixed)]


TRANSFORMS = {
    "default": {},
    "mix": {"qtransform": ("qtransform_completed_by_mix_value", {"value_scale": 0.2, "maxvisit_init": 10.0})},
    "raw": {
        "qtransform": ("qtransform_completed_by_mix_value", {"use_mixed_value": False, "rescale_values": False}),
        "max_depth": 2,
    },
    "range": {"qtransform": ("qtransform_by_min_max", {"min_value": -4.0, "max_value": 4.0}), "max_depth": 3},
    "siblings": {"qtransform": ("qtransform_by_parent_and_siblings", {"epsilon": 1e-3}), "max_depth": 1},
}


@pytest.mark.parametrize(
    ("policy", "transform"),
    [
        *[("muzero_policy", name) for name in ("default", "mix", "range")],
        *[("gumbel_muzero_policy", name) for name in ("default", "raw", "siblings")],
    ],
)
def test_equals_mctx_on_tables(policy, transform):
    """Players in turn, ends of episodes, plain discounts; whatever is invalid; with and without a limit of depth."""
    batch, actions, sims = 6, 5, 14
    pair = both(policy, models.table_step, sims, **TRANSFORMS[transform])
    for seed, discounts in enumerate([(0.97,), (-1.0,), (0.0, 1.0, -1.0)]):
        model = jax.tree.map(jnp.asarray, models.table(seed, 40, actions, discounts))
        root = models.table_root(model, np.arange(batch))
        for number, invalid in enumerate(masks(seed, batch, actions)):
            assert_equal(pair, model, jax.random.PRNGKey(10 * seed + number), root, invalid)


@pytest.mark.parametrize(
    ("policy", "batch", "actions", "sims", "options"),
    [
        ("muzero_policy", 4, 3, 20, {"temperature": 0.5, "dirichlet_alpha": 1.0, "pb_c_init": 2.0}),
        ("gumbel_muzero_policy", 3, 20, 21, {}),
        ("gumbel_muzero_policy", 5, 4, 12, {"max_num_considered_actions": 3, "gumbel_scale": 0.0}),
        ("muzero_policy", 2, 1, 3, {}),
        ("gumbel_muzero_policy", 1, 1, 2, {}),
        ("muzero_policy", 3, 6, 1, {"dirichlet_fraction": 0.0}),
        ("gumbel_muzero_policy", 3, 2, 1, {"max_num_considered_actions": 1}),
    ],
)
def test_equals_mctx_on_networks(policy, batch, actions, sims, options):
    pair = both(policy, models.network_step, sims, **options)
    for seed in range(4):
        model, key = models.network(seed, actions), jax.random.PRNGKey(seed)
        invalid = masks(seed, batch, actions)[seed]
        assert_equal(pair, model, key, models.network_root(model, seed, batch), invalid)


@pytest.mark.parametrize(("actions", "outcomes", "depth"), [(4, 3, None), (2, 5, 3)])
def test_stochastic_search_equals_mctx(actions, outcomes, depth):
    pair = both(
        "stochastic_muzero_policy", models.decision_step, models.chance_step, 16, max_depth=depth, temperature=0.3
    )
    for seed in range(4):
        model, key = models.two_plies(seed, actions, outcomes), jax.random.PRNGKey(seed)
        root = models.network_root(model, seed, 5)
        assert_equal(pair, model, key, root, masks(seed, 5, actions)[seed])


def test_whole_trees_equal_mctx():
    """Every array of the tree, not only the root's."""
    model = jax.tree.map(jnp.asarray, models.table(3, 30, 4, (1.0, -1.0)))
    root = models.table_root(model, np.arange(3))

    def run(library):
        options = {"dirichlet_over": "all"} if library is search else {}
        policy = partial(library.muzero_policy, recurrent_fn=models.table_step, num_simulations=12, **options)
        return mesh.compiled_quickly(policy)(model, jax.random.PRNGKey(5), root).search_tree

    ours, theirs = run(search), run(mctx)
    for name in ("node_visits", "parents", "action_from_parent", "children_index", "children_visits"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
    for name in ("node_values", "raw_values", "children_rewards", "children_discounts", "children_values"):
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), atol=1e-6, err_msg=name)
    prior = jax.nn.softmax(theirs.children_prior_logits[:, 1:])
    np.testing.assert_allclose(jnp.exp(ours.children_prior_logits[:, 1:]), prior, atol=1e-6)
    stored = jax.tree.map(ours.per_tree, ours.embeddings)
    jax.tree.map(np.testing.assert_array_equal, stored, theirs.embeddings)
    index = jnp.arange(3)
    np.testing.assert_allclose(ours.qvalues(index), theirs.qvalues(index), atol=1e-6)


def test_a_transformation_written_for_mctx_works_unchanged():
    model, key = models.network(0, 4), jax.random.PRNGKey(0)
    root = models.network_root(model, 0, 3)
    settings = {"min_value": -3.0, "max_value": 3.0}

    def run(transform):
        options = {"recurrent_fn": models.network_step, "num_simulations": 10}
        policy = partial(search.muzero_policy, **options, qtransform=partial(transform, **settings))
        return mesh.compiled_quickly(policy)(model, key, root)

    mine, theirs = run(search.qtransform_by_min_max), run(mctx.qtransform_by_min_max)
    np.testing.assert_array_equal(mine.search_tree.node_visits, theirs.search_tree.node_visits)
    np.testing.assert_allclose(mine.action_weights, theirs.action_weights, atol=1e-6)
