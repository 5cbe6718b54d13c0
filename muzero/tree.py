"""A batch of search trees as flat arrays, and how to read it.

B trees of N nodes, W edges at each. Node n of tree b is row n * B + b of every array, so that

    row   0 ... B-1 |  B ... 2B-1 | 2B ... 3B-1 |  ...          F = N * B rows
          the roots | first nodes | second ones |

and the nodes that one simulation adds to all trees are one block: they are written by one `dynamic_update_slice`. An
edge stores the row of its child, -1 where it was never taken. Everything that selection needs of a node lies in one
row of `rows` and is fetched by one gather (the roots', which every simulation reads and changes, lie apart):

    | logits W | probs W | q-values W | visits W | value | count | raw value | chance |

The prior is normalised once, when the node is made. Reward and discount belong to the node they lead to, so an edge's
Q-value is `reward + discount * value` of its child, kept up to date in the parent's row. The visits of an edge are the
count of its child. `best` is what selection would do at each node now: it is computed when a node's numbers change,
not when it is passed, so that a descent only follows pointers.

The layout is the same where a search evaluates k leaves per tree at once: k blocks are then written together. All
numbers are float32 (counts are exact up to 2^24), whatever the model computes in; embeddings keep their dtype.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from muzero.qvalues import ILLEGAL, Node
from muzero.recurrent import Expansion
from podracer.types import Array

SCALARS = 4  # value, count, raw value, chance


class SearchSummary(NamedTuple):
    """What a search found out about its roots."""

    visit_counts: Array  # [B, A]
    visit_probs: Array  # [B, A] their shares; uniform where nothing was visited
    value: Array  # [B] mean of the returns
    qvalues: Array  # [B, A] 0 where unvisited
    nonfinite_at: (
        Array  # [B] int32, the first simulation (1, 2, ...; 0: the root) with a NaN in what the model said; -1
    )


class Tree(NamedTuple):
    """B trees of N nodes; the properties give them per tree, with mctx's names."""

    root: Node  # the same numbers of the roots, [B, W] and [B, 1] each: they change at every simulation, all at once
    rows: Array  # [F, 4 W + 4] float32, see the module's docstring; those of the roots are unused
    child: Array  # [F, W] int32, row of the child, -1 where there is none
    best: Array  # [F, 2] int32, the edge that selection takes now, and its child; unused at the roots
    up: Array  # [F, 2] int32, row of the parent and the edge that leads here; -1 at roots and unused nodes
    step: Array  # [F, 2] float32, reward and discount on that edge
    broken: Array  # [F] bool, what the model said of the node was not finite; it counts as 0
    embeddings: Any  # [F, ...]
    root_invalid_actions: Array  # [B, A] bool
    extra_data: Any = ()  # [B, ...] Gumbel: `root_gumbel` [B, A]

    ROOT_INDEX = 0
    NO_PARENT = -1
    UNVISITED = -1

    @property
    def batch_size(self) -> int:
        return self.root_invalid_actions.shape[0]

    @property
    def num_actions(self) -> int:
        return self.root_invalid_actions.shape[1]

    @property
    def num_edges(self) -> int:
        """W: the actions, or the chance outcomes where they are more."""
        return self.child.shape[1]

    @property
    def num_simulations(self) -> int:
        return self.child.shape[0] // self.batch_size - 1

    def per_tree(self, rows: Array) -> Array:
        """`rows` [F, ...] as [B, N, ...]."""
        return jnp.swapaxes(rows.reshape(-1, self.batch_size, *rows.shape[1:]), 0, 1)

    def _nodes(self) -> Node:
        """The statistics of all nodes, [B, N, W] and [B, N, 1]."""
        inner = as_node(self.rows, self.num_edges)
        return jax.tree.map(lambda rows, roots: self.per_tree(put(rows, roots, 0)), inner, self.root)

    @property
    def children_prior_logits(self) -> Array:
        """[B, N, W] log-probabilities; ILLEGAL (-1e30) where there is no such action."""
        return self._nodes().logits

    @property
    def children_qvalues(self) -> Array:
        """[B, N, W] reward + discount * value of the child; 0 where unvisited."""
        return self._nodes().qvalues

    @property
    def children_visits(self) -> Array:
        """[B, N, W] int32."""
        return self._nodes().visits.astype(jnp.int32)

    @property
    def node_values(self) -> Array:
        """[B, N] mean of the returns."""
        return self._nodes().value[..., 0]

    @property
    def node_visits(self) -> Array:
        """[B, N] int32, 0 where the node does not exist."""
        return self._nodes().count[..., 0].astype(jnp.int32)

    @property
    def raw_values(self) -> Array:
        """[B, N] the model's values."""
        return self._nodes().raw_value[..., 0]

    @property
    def chance_nodes(self) -> Array:
        """[B, N] bool: edges are outcomes, not actions."""
        return self._nodes().chance[..., 0] > 0

    @property
    def children_index(self) -> Array:
        """[B, N, W] int32, the node's number within its tree, -1 where unvisited."""
        return self.per_tree(jnp.where(self.child < 0, -1, self.child // self.batch_size))

    @property
    def parents(self) -> Array:
        """[B, N] int32, -1 at the root and where the node does not exist."""
        return self.per_tree(jnp.where(self.up[:, 0] < 0, -1, self.up[:, 0] // self.batch_size))

    @property
    def action_from_parent(self) -> Array:
        """[B, N] int32, -1 at the root."""
        return self.per_tree(self.up[:, 1])

    def _of_children(self, values: Array) -> Array:
        return self.per_tree(jnp.where(self.child < 0, 0.0, values[jnp.maximum(self.child, 0)]))

    @property
    def children_rewards(self) -> Array:
        """[B, N, W] 0 where unvisited."""
        return self._of_children(self.step[:, 0])

    @property
    def children_discounts(self) -> Array:
        """[B, N, W] 0 where unvisited."""
        return self._of_children(self.step[:, 1])

    @property
    def children_values(self) -> Array:
        """[B, N, W] 0 where unvisited."""
        return self._of_children(self.rows[:, 4 * self.num_edges])

    def qvalues(self, indices: Array) -> Array:
        """Q-values [B, W] of one node per tree, `indices` [B]."""
        return self.children_qvalues[jnp.arange(self.batch_size), indices]

    def summary(self) -> SearchSummary:
        """Visits, value and Q-values of the roots, and whether the model failed."""
        root, actions = self.root, slice(0, self.num_actions)
        visits = root.visits[:, actions]
        total = jnp.sum(visits, axis=-1, keepdims=True)
        probs = jnp.where(total > 0, visits / jnp.maximum(total, 1), 1 / self.num_actions)
        strange = self.per_tree(self.broken)
        nonfinite_at = jnp.where(jnp.any(strange, -1), jnp.argmax(strange, -1), -1).astype(jnp.int32)
        return SearchSummary(visits, probs, root.value[:, 0], root.qvalues[:, actions], nonfinite_at)


def as_node(rows: Array, width: int) -> Node:
    """Rows [L, 4 W + 4] by name."""
    blocks = [rows[:, i * width : (i + 1) * width] for i in range(4)]
    scalars = [rows[:, 4 * width + i : 4 * width + i + 1] for i in range(SCALARS)]
    return Node(*blocks, *scalars)


def fresh_rows(new: Expansion, count: Array, noise: Array | None) -> Array:
    """Rows [L, 4 W + 4] of nodes without children; `noise` [L, W] breaks ties in the prior of the player's nodes."""
    logits, probs = new.prior
    if noise is not None:
        probs += noise * (1 - new.chance[:, None])
    nothing = jnp.zeros_like(logits)
    scalars = jnp.stack([new.value, count, new.value, new.chance], axis=1)
    return jnp.concatenate([logits, probs, nothing, nothing, scalars], axis=1)


def put(array: Array, block: Array, start: Any) -> Array:
    """`array` with `block` in the rows from `start` on."""
    return jax.lax.dynamic_update_slice_in_dim(array, block.astype(array.dtype), start, axis=0)


def take(array: Array, index: Array) -> Array:
    """Rows `index`, which are known to exist."""
    return array.at[index].get(mode="promise_in_bounds")


def plant(
    root: Expansion, embedding: Any, invalid: Array, num_nodes: int, noise: Array | None = None, extra_data: Any = ()
) -> Tree:
    """Trees of a root each, with room for `num_nodes` nodes."""
    batch, width = root.prior.logits.shape
    rows = batch * num_nodes

    def room(block: Array) -> Array:
        return put(jnp.zeros((rows, *block.shape[1:]), block.dtype), block, 0)

    return Tree(
        root=as_node(fresh_rows(root, jnp.ones(batch), noise), width),
        rows=jnp.zeros((rows, 4 * width + SCALARS)),
        child=jnp.full((rows, width), -1, jnp.int32),
        best=jnp.full((rows, 2), -1, jnp.int32),
        up=jnp.full((rows, 2), -1, jnp.int32),
        step=jnp.zeros((rows, 2)),
        broken=room(root.broken),
        embeddings=jax.tree.map(lambda leaf: room(jnp.asarray(leaf)), embedding),
        root_invalid_actions=invalid,
        extra_data=extra_data,
    )


__all__ = ["ILLEGAL", "SearchSummary", "Tree", "as_node", "fresh_rows", "plant", "put", "take"]
