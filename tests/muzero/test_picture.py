"""The picture of a search tree, against mctx's tree of the same search."""

from __future__ import annotations

import jax
import mctx
import numpy as np
import pytest

from muzero import picture, search
from podracer import plot
from podracer.errors import UserError
from tests.muzero.search import models

SIMS, ACTIONS = 12, 3


@pytest.fixture(scope="module")
def trees():
    """`(ours, mctx's)` of the same search."""
    model = jax.tree.map(jax.numpy.asarray, models.table(0, 30, ACTIONS))
    arguments = (model, jax.random.PRNGKey(1), models.table_root(model, np.array([3, 8])), models.table_step, SIMS)
    return tuple(policy(*arguments).search_tree for policy in (search.gumbel_muzero_policy, mctx.gumbel_muzero_policy))


@pytest.mark.parametrize("number", [0, 1])
def test_every_node_is_there_once_with_its_numbers(trees, number):
    ours, theirs = trees
    shown = picture.nodes(ours, number)
    assert sorted(node.index for node in shown) == list(range(SIMS + 1))
    for place, node in enumerate(shown):
        assert node.visits == theirs.node_visits[number, node.index]
        assert node.value == pytest.approx(float(theirs.node_values[number, node.index]), abs=1e-5)
        if place == 0:
            assert (node.parent, node.edge, node.depth, node.index) == (-1, -1, 0, 0)
            continue
        above = shown[node.parent]
        assert node.parent < place and node.depth == above.depth + 1 and not node.chance
        assert theirs.parents[number, node.index] == above.index
        assert theirs.action_from_parent[number, node.index] == node.edge
        qvalue = theirs.qvalues(np.array([above.index] * 2))[number, node.edge]
        assert node.qvalue == pytest.approx(float(qvalue), abs=1e-5)
        prior = jax.nn.softmax(theirs.children_prior_logits[number, above.index])[node.edge]
        assert node.prior == pytest.approx(float(prior), abs=1e-5)


def test_nodes_do_not_stand_on_one_another_and_parents_stand_over_their_children(trees):
    shown = picture.nodes(trees[0])
    where = picture.places(shown)
    assert len({tuple(spot) for spot in where}) == len(shown)
    for place, node in enumerate(shown):
        assert where[place, 1] == -node.depth
        below = [where[child, 0] for child, other in enumerate(shown) if other.parent == place]
        if below:
            assert where[place, 0] == pytest.approx(np.mean(below)) and below == sorted(below)


def test_the_picture_is_written(trees, tmp_path):
    """The action that was taken stands out."""
    figure = picture.draw(trees[0], chosen=1)
    lines = figure.axes[0].lines
    assert len(lines) == SIMS and [line.get_color() for line in lines].count("C1") == 1
    plot.save(figure, tmp_path / "tree.png")
    assert (tmp_path / "tree.png").stat().st_size > 5_000


def test_trees_of_the_other_library_are_refused(trees):
    with pytest.raises(UserError, match=r"got a tree of mctx.*; expected one of muzero.search. Set search to fast"):
        picture.nodes(trees[1])
