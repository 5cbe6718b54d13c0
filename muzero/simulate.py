"""One simulation on all trees: descend, expand, back up, select anew where numbers changed.

Lanes. A simulation works on L = k * B lanes; lane `slot * B + b` starts at the root of tree b with an action of its own
and, as the sub-trees under different actions of a root share nothing, lanes never meet. The plain search has one lane
per tree (k = 1); whole rounds of Sequential Halving have one per surviving action.

What costs time on a batch is that trees are not equally deep: the loops run as often as the deepest lane needs. So the
loops over levels move single numbers only, [L] each: `descend` follows `best`, `_back_up` adds up returns. The costly
part, scoring the W edges of a node, is done afterwards for the nodes that changed, packed densely into chunks
(`_reselect`): mean depth, not greatest depth, counts. Whether a chunk ends with rows of an earlier one does not matter,
as selecting again from unchanged numbers changes nothing.

No loop carries a tree that is selected over (`vmap` of a `while_loop` copies all of it at each step): updates are
scatters of L elements, in place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from muzero.qvalues import ILLEGAL, Node, first_of_highest
from muzero.recurrent import Expand, Expansion
from muzero.tree import Tree, as_node, fresh_rows, put, take
from podracer.types import Array

Select = Callable[[Node], Array]


class Limits(NamedTuple):
    """How far a search goes."""

    num_simulations: int
    max_depth: int | None = None  # the greatest number of edges to a node
    loop_fn: Callable = jax.lax.fori_loop

    @property
    def depth(self) -> int:
        return self.num_simulations if self.max_depth is None else min(self.max_depth, self.num_simulations)


class Start(NamedTuple):
    """Where the lanes of a simulation leave the roots."""

    action: Array  # [L] int32
    alive: Array | None = None  # [L] bool: lanes that count; None: all. The others are expanded and forgotten


class Leaf(NamedTuple):
    """The edges that a simulation expands."""

    parent: Array  # [L] int32, a row
    action: Array  # [L] int32
    known: Array  # [L] int32, row of the node there already is (the depth limit was reached), else -1
    between: Array  # [L] int32, number of nodes between the root and the new node


def run(
    key: Array,
    tree: Tree,
    expand: Expand,
    choose: Callable[[Tree, Array], Array],
    select: Select,
    limits: Limits,
    ties: Callable[[Any], Array] | None = None,
) -> Tree:
    """All simulations, one after the other.

    Args:
      key: split for the calls of the model.
      tree: roots only.
      expand: the model.
      choose: `(tree, number of the simulation) -> [B]`, the actions at the roots.
      select: the rule below the roots.
      limits: how many, how deep.
      ties: `(number of the node) -> [B, W]` noise for its prior, see `tie_noise`.
    """
    keys = jax.random.split(key, limits.num_simulations)
    revisits = limits.depth < limits.num_simulations

    def body(index, tree):
        start, first_row = Start(choose(tree, index)), (index + 1) * tree.batch_size
        noise = None if ties is None else ties(index + 1)
        return simulate(tree, start, first_row, partial(expand, keys[index]), select, limits.depth, revisits, noise)

    return limits.loop_fn(0, limits.num_simulations, body, tree)


def tie_noise(key: Array, shape: tuple[int, ...]) -> Callable[[Any], Array]:
    """`(number of a node) -> [B, W]` in [0, 1e-7): one draw per search, another order of the actions at each node."""
    noise = jax.random.uniform(jax.random.fold_in(key, 0), shape)
    step = jnp.arange(1, shape[1] + 1) * 0.6180339887  # multiples of the golden ratio spread evenly

    def of_node(number: Any) -> Array:
        turned = noise + jnp.broadcast_to(number * step, shape)
        return 1e-7 * (turned - jnp.floor(turned))

    return of_node


def simulate(
    tree: Tree,
    start: Start,
    first_row: Any,
    expand: Callable[[Array, Any], tuple[Expansion, Any]],
    select: Select,
    max_depth: int,
    revisits: bool,
    noise: Array | None = None,
) -> Tree:
    """Add one node per lane.

    Args:
      tree: the trees so far.
      start: the actions at the roots.
      first_row: the rows from here on are the new nodes'.
      expand: `(action [L], embedding [L, ...]) -> (Expansion, embedding)`.
      select: the rule below the roots.
      max_depth: the greatest number of edges to a node.
      revisits: whether a node can be in the way at that depth. It is evaluated again: the new node takes its place
        and inherits its visits.
      noise: [L, W] added to the new nodes' prior.
    """
    leaf = descend(tree, start, max_depth)
    embedding = jax.tree.map(lambda stored: take(stored, leaf.parent), tree.embeddings)
    new, embedding = expand(leaf.action, embedding)
    count = jnp.ones_like(new.value)
    if revisits:
        place = jnp.maximum(leaf.known, 0) * tree.rows.shape[1] + 4 * tree.num_edges + 1
        count += jnp.where(leaf.known >= 0, take(tree.rows.reshape(-1), place), 0.0)
    tree = _attach(tree, start, leaf, new, fresh_rows(new, count, noise), embedding, first_row)
    tree, changed, total = _back_up(tree, start, leaf, new, count, max_depth)
    return _reselect(tree, changed, total, select) if max_depth > 1 else tree


def descend(tree: Tree, start: Start, max_depth: int) -> Leaf:
    """Follow `best` from the roots to an edge without a node, or to the depth limit."""
    size = start.action.shape[0]
    root = jnp.arange(size, dtype=jnp.int32) % tree.batch_size
    node = take(tree.child.reshape(-1), root * tree.num_edges + start.action)
    if start.alive is not None:
        node = jnp.where(start.alive, node, -1)

    def more(carry):
        leaf, level = carry
        return (level < max_depth) & jnp.any(leaf.known >= 0)

    def down(carry):
        leaf, level = carry
        inside = leaf.known >= 0
        best = take(tree.best, jnp.maximum(leaf.known, 0))
        return Leaf(
            jnp.where(inside, leaf.known, leaf.parent),
            jnp.where(inside, best[:, 0], leaf.action),
            jnp.where(inside, best[:, 1], -1),
            leaf.between + inside,
        ), level + 1

    leaf = Leaf(root, start.action, node, jnp.zeros(size, jnp.int32))
    if max_depth == 1:
        return leaf
    return jax.lax.while_loop(more, down, (leaf, jnp.int32(1)))[0]


def _attach(tree: Tree, start: Start, leaf: Leaf, new: Expansion, rows: Array, embedding: Any, first_row: Any) -> Tree:
    """Write the new nodes and the edges to them."""
    size, width = new.prior.logits.shape
    parent, edge = leaf.parent, leaf.parent * width + leaf.action
    if start.alive is not None:
        parent = jnp.where(start.alive, parent, -1)
        edge = jnp.where(start.alive, edge, tree.child.size)
    # What the model says of an action that is not there, and that nobody takes, is no fault of its.
    broken = new.broken if start.alive is None else new.broken & start.alive
    row = first_row + jnp.arange(size, dtype=jnp.int32)
    node = as_node(rows, width)
    # Without visits every transformation gives all actions the same Q-value, so the prior decides.
    first = first_of_highest(jnp.where(node.legal, node.probs, ILLEGAL), node)
    return tree._replace(
        rows=put(tree.rows, rows, first_row),
        child=tree.child.reshape(-1).at[edge].set(row, mode="drop").reshape(tree.child.shape),
        best=put(tree.best, jnp.stack([first, jnp.full_like(first, -1)], axis=1), first_row),
        up=put(tree.up, jnp.stack([parent, leaf.action], axis=1), first_row),
        step=put(tree.step, jnp.stack([new.reward, new.discount], axis=1), first_row),
        broken=put(tree.broken, broken, first_row),
        embeddings=jax.tree.map(lambda stored, leaf: put(stored, leaf, first_row), tree.embeddings, embedding),
    )


class _Climb(NamedTuple):
    """The state of a backup, per lane: the edge it is about to pass, and what it has of the node below."""

    up: Array  # [L, 2] parent's row, edge
    step: Array  # [L, 2] reward, discount
    returns: Array  # [L] from the node below on
    value: Array  # [L] of the node below, already updated
    count: Array  # [L] of the node below, already updated
    slot: Array  # [L] where the next changed node is noted


def _back_up(
    tree: Tree, start: Start, leaf: Leaf, new: Expansion, count: Array, max_depth: int
) -> tuple[Tree, Array, Array]:
    """Running means from the leaves to the roots (Schrittwieser et al. 2020, appendix B, equations 3 and 4).

    Returns:
      the tree; the rows between root and leaf [Q], packed; how many those are.
    """
    size, width, batch = leaf.action.shape[0], tree.num_edges, tree.batch_size
    stride, far = tree.rows.shape[1], tree.rows.size
    ends = jnp.cumsum(leaf.between)
    levels = min(max_depth, tree.num_simulations)
    changed = jnp.zeros(size * levels, jnp.int32)
    up = jnp.stack([leaf.parent, leaf.action], axis=1)
    climb = _Climb(up, jnp.stack([new.reward, new.discount], 1), new.value, new.value, count, ends - leaf.between)

    def more(carry):
        return jnp.any(carry[0].up[:, 0] >= batch)

    def climb_one(carry):
        at, flat, changed = carry
        parent, edge, reward, discount = at.up[:, 0], at.up[:, 1], at.step[:, 0], at.step[:, 1]
        inside = parent >= batch
        returns = reward + discount * at.returns
        place = parent * stride + 4 * width
        value, visits = take(flat, place), take(flat, place + 1)
        value = (value * visits + returns) / (visits + 1)
        q = parent * stride + 2 * width + edge
        index = jnp.where(inside, jnp.stack([q, q + width, place, place + 1]), far)
        numbers = jnp.stack([reward + discount * at.value, at.count, value, visits + 1])
        flat = flat.at[index.reshape(-1)].set(numbers.reshape(-1), mode="drop")
        changed = changed.at[jnp.where(inside, at.slot, changed.size)].set(parent, mode="drop")
        then = _Climb(take(tree.up, parent), take(tree.step, parent), returns, value, visits + 1, at.slot + 1)
        return jax.tree.map(lambda a, b: jnp.where(_like(inside, a), a, b), then, at), flat, changed

    flat = tree.rows.reshape(-1)
    if max_depth > 1:
        climb, flat, changed = jax.lax.while_loop(more, climb_one, (climb, flat, changed))
    tree = tree._replace(rows=flat.reshape(tree.rows.shape), root=_update_roots(tree.root, start, climb))
    return tree, changed, ends[-1]


def _like(mask: Array, array: Array) -> Array:
    return mask if array.ndim == 1 else mask[:, None]


def _update_roots(root: Node, start: Start, climb: _Climb) -> Node:
    """The last edge of each lane and the means of the roots, outside of the loop: it is the same level for all.

    Dense, as all trees have one row each here: a scatter goes element by element. And a search of one round needs
    nothing else of its trees for what it returns, so that XLA leaves the writing of the nodes out.
    """
    batch, width = root.visits.shape
    reward, discount = climb.step[:, 0], climb.step[:, 1]
    by_tree = lambda lanes: lanes.reshape(-1, batch, 1)
    taken = (
        by_tree(start.action) == jnp.arange(width)[None, None]
    )  # [k, B, W]; the lanes of a tree take different actions
    alive = jnp.ones_like(reward) if start.alive is None else start.alive.astype(jnp.float32)
    if start.alive is not None:
        taken &= by_tree(start.alive)
    fill = lambda old, lanes: jnp.where(jnp.any(taken, 0), jnp.sum(jnp.where(taken, by_tree(lanes), 0.0), 0), old)
    returns = jnp.sum(by_tree((reward + discount * climb.returns) * alive), axis=0)
    count = root.count + jnp.sum(by_tree(alive), axis=0)
    return root._replace(
        qvalues=fill(root.qvalues, reward + discount * climb.value),
        visits=fill(root.visits, climb.count),
        value=(root.value * root.count + returns) / count,
        count=count,
    )


def _reselect(tree: Tree, changed: Array, total: Array, select: Select) -> Tree:
    """Renew `best` of the first `total` rows in `changed`, a chunk at a time."""
    chunk = tree.batch_size

    def body(carry):
        start, best = carry
        row = jax.lax.dynamic_slice(changed, (start,), (chunk,))
        edge = select(as_node(take(tree.rows, row), tree.num_edges))
        child = take(tree.child.reshape(-1), row * tree.num_edges + edge)
        return start + chunk, best.at[row].set(jnp.stack([edge, child], axis=1), mode="promise_in_bounds")

    _, best = jax.lax.while_loop(lambda carry: carry[0] < total, body, (jnp.int32(0), tree.best))
    return tree._replace(best=best)
