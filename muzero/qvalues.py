"""What selection sees of a node, and the transformations that put its Q-values on the scale of its prior.

A transformation takes a `Node` and returns [L, W]. The three here have mctx's names and options. One written for mctx,
`(tree, node_index) -> [A]`, works too: the policies recognise it by its two arguments.

Why some lines are written as they are: XLA's CPU backend (measured on jax 0.10) evaluates what is fused into a
reduction about five times more slowly than a plain loop, and likewise a row's maximum that is spread over the row
again. A `where` keeps such fusions apart. Hence `highest`, and the `where` around whatever is reduced next.

Sources: Schrittwieser et al. 2020 (MuZero), appendix B; Danihelka et al. 2022 (Gumbel MuZero), appendix D.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podracer.types import Array

# In place of -inf: an action that must not be taken. Whatever is below half of it counts as illegal.
ILLEGAL = -1e30
TINY = float(jnp.finfo(jnp.float32).tiny)


class Node(NamedTuple):
    """The statistics of L nodes with W edges each, all float32."""

    logits: Array  # [L, W] log-probabilities of the prior; ILLEGAL where there is no such action
    probs: Array  # [L, W] the prior itself
    qvalues: Array  # [L, W] reward + discount * value of the child; 0 where unvisited
    visits: Array  # [L, W] how often each edge was taken
    value: Array  # [L, 1] mean of the returns that were backed up, the model's own value included
    count: Array  # [L, 1] how many those were
    raw_value: Array  # [L, 1] the model's value
    chance: Array  # [L, 1] 1 where the world moves, not the player (Stochastic MuZero)

    @property
    def legal(self) -> Array:
        """[L, W] bool."""
        return self.logits > ILLEGAL / 2

    @property
    def visited(self) -> Array:
        """[L, W] bool."""
        return self.visits > 0


QTransform = Callable[[Node], Array]


def highest(values: Array, node: Node) -> Array:
    """The maximum of each row, [L, 1]. Counts are positive: the `where` is only there for the compiler."""
    return jnp.where(node.count > 0, jnp.max(values, axis=-1, keepdims=True), 0.0)


def first_of_highest(values: Array, node: Node) -> Array:
    """The first index of each row's maximum, [L] int32. Faster than `argmax` on a CPU, where it is a scalar loop."""
    index = jax.lax.broadcasted_iota(jnp.float32, values.shape, 1)
    found = jnp.min(jnp.where(values == highest(values, node), index, float(values.shape[-1] - 1)), axis=-1)
    return found.astype(jnp.int32)


def qtransform_by_min_max(node: Node, *, min_value: Any, max_value: Any) -> Array:
    """Q-values from `[min_value, max_value]`, the range they can have, to [0, 1]; unvisited actions get 0."""
    return jnp.where(node.visited, (node.qvalues - min_value) / (max_value - min_value), 0.0)


def qtransform_by_parent_and_siblings(node: Node, *, epsilon: Any = 1e-8) -> Array:
    """Q-values to [0, 1] by the least and greatest of the node's value and its visited Q-values.

    Unvisited actions get 0. `epsilon` is the least range that is stretched.
    """
    known = jnp.where(node.visited, node.qvalues, node.value)
    low = jnp.minimum(node.value, jnp.min(known, axis=-1, keepdims=True))
    high = jnp.maximum(node.value, jnp.max(known, axis=-1, keepdims=True))
    return jnp.where(node.visited, (node.qvalues - low) / jnp.maximum(high - low, epsilon), 0.0)


def qtransform_completed_by_mix_value(
    node: Node,
    *,
    value_scale: Any = 0.1,
    maxvisit_init: Any = 50.0,
    rescale_values: bool = True,
    use_mixed_value: bool = True,
    epsilon: Any = 1e-8,
) -> Array:
    """Completed Q-values as an addition to the logits (Danihelka et al. 2022, equations 8, 10 and 33).

    Unvisited actions get the mixed value, between the model's value and the prior-weighted visited Q-values; then
    everything is multiplied by `(maxvisit_init + greatest visit count) * value_scale`.

    Args:
      value_scale: weight of the Q-values against the prior.
      maxvisit_init: what is added to the greatest visit count.
      rescale_values: stretch the completed Q-values to [0, 1] first.
      use_mixed_value: False completes with the model's value.
      epsilon: the least range that is stretched.
    """
    completed = jnp.where(node.visited, node.qvalues, _mixed_value(node) if use_mixed_value else node.raw_value)
    scale = (maxvisit_init + jnp.max(node.visits, axis=-1, keepdims=True)) * value_scale
    if not rescale_values:
        return completed * scale
    low = jnp.min(completed, axis=-1, keepdims=True)
    high = jnp.max(completed, axis=-1, keepdims=True)
    return (completed - low) * (scale / jnp.maximum(high - low, epsilon))


def _mixed_value(node: Node) -> Array:
    """[L, 1]: (v + N * sum of prior * q over the visited / sum of their prior) / (N + 1)."""
    probs = jnp.maximum(node.probs, TINY)  # visited actions may have a prior of 0
    weight = jnp.sum(jnp.where(node.visited, probs, 0.0), axis=-1, keepdims=True)
    weighted = jnp.sum(jnp.where(node.visited, probs * node.qvalues, 0.0), axis=-1, keepdims=True)
    visits = jnp.sum(node.visits, axis=-1, keepdims=True)
    return (node.raw_value + visits * weighted / jnp.where(weight > 0, weight, 1.0)) / (visits + 1)


def adapted(qtransform: Callable) -> QTransform:
    """`qtransform` as a function of a `Node`; one of mctx's convention, `(tree, node_index)`, is wrapped."""
    needed = [
        each
        for each in inspect.signature(qtransform).parameters.values()
        if each.default is each.empty and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    if len(needed) != 2:
        return qtransform
    return lambda node: jax.vmap(lambda one: qtransform(_OneNode(one), 0))(node)


class _OneNode:
    """A tree of a single node, with the attributes of mctx's tree that transformations read."""

    def __init__(self, node: Node):
        self.children_prior_logits, self.children_visits = node.logits[None], node.visits[None].astype(jnp.int32)
        self.node_values, self.raw_values, self.node_visits = node.value, node.raw_value, node.count
        self._qvalues = node.qvalues

    def qvalues(self, node_index: Any) -> Array:
        del node_index
        return self._qvalues
