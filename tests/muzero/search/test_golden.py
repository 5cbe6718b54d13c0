"""Whole trees of fixed models as they were when their equality with mctx was last looked at.

    python -m tests.muzero.search.test_golden        # writes the file anew

`test_equals_mctx.py` compares with mctx as it is installed. This file says, besides, when our trees change while mctx's
change with them, and holds the trees that mctx has none of (in rounds).
"""

from __future__ import annotations

import json
import pathlib
from functools import partial

import jax
import jax.numpy as jnp
import mctx
import numpy as np
import pytest

from muzero import picture, search
from podracer import mesh
from tests.muzero.search import models

FILE = pathlib.Path(__file__).parents[2] / "golden" / "search_trees.json"
POLICIES = {
    "muzero": partial(search.muzero_policy, dirichlet_fraction=0.0),
    "gumbel": partial(search.gumbel_muzero_policy, gumbel_scale=0.0),
    "rounds": partial(search.gumbel_muzero_policy, gumbel_scale=0.0, mode="rounds"),
    "depth": partial(search.muzero_policy, dirichlet_fraction=0.0, max_depth=2),
    "chance": partial(search.stochastic_muzero_policy, dirichlet_fraction=0.0),
}


def decide(model, key, action, embedding):
    """Two outcomes, of which the second is three times as likely."""
    chance = jnp.broadcast_to(jnp.log(jnp.array([0.25, 0.75])), (action.shape[0], 2))
    value = model.value[embedding["state"]]
    return mctx.DecisionRecurrentFnOutput(chance_logits=chance, afterstate_value=value), (embedding, action)


def happen(model, key, outcome, afterstate):
    """The first outcome is that of the action, the second that of the next one."""
    embedding, action = afterstate
    output, after = models.table_step(model, key, (action + outcome) % 4, embedding)
    return mctx.ChanceRecurrentFnOutput(
        action_logits=output.prior_logits, value=output.value, reward=output.reward, discount=output.discount
    ), after


def grow(name: str) -> list[list[float]]:
    """The nodes of one tree: parent, edge, visits, value, Q-value of the edge."""
    # Powers of two and few of them: sums are exact, whatever the order.
    rng = np.random.default_rng(5)
    model = models.table(5, 24, 4)._replace(
        reward=rng.integers(-4, 5, (24, 4)).astype(np.float32) / 4,
        discount=np.full((24, 4), 0.5, np.float32),
        value=rng.integers(-8, 9, 24).astype(np.float32) / 8,
    )
    model = jax.tree.map(jnp.asarray, model)
    functions = {"recurrent_fn": models.table_step}
    if name == "chance":
        functions = {"decision_recurrent_fn": decide, "chance_recurrent_fn": happen}
    policy = partial(POLICIES[name], **functions, num_simulations=14)
    output = mesh.compiled_quickly(policy)(model, jax.random.PRNGKey(0), models.table_root(model, np.arange(2)))
    return [[n.parent, n.edge, n.visits, n.value, n.qvalue] for n in picture.nodes(output.search_tree, 1)]


@pytest.mark.parametrize("name", POLICIES)
def test_trees_are_as_they_were(name):
    known = json.loads(FILE.read_text())[name]
    found = grow(name)
    assert [node[:3] for node in found] == [node[:3] for node in known]
    np.testing.assert_allclose([node[3:] for node in found], [node[3:] for node in known], atol=1e-5)


if __name__ == "__main__":
    trees = {name: [[round(x, 6) for x in node] for node in grow(name)] for name in POLICIES}
    lines = ",\n".join(f'"{name}": {json.dumps(nodes)}' for name, nodes in trees.items())
    FILE.write_text(f"{{\n{lines}\n}}\n")
