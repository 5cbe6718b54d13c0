"""Which edge of a node a simulation takes: one rule per kind of node, each from a `Node` to [L] int32.

Ties go to the first action. The policies that mctx breaks ties for at random break them here by noise in the prior.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from muzero.qvalues import ILLEGAL, Node, QTransform, first_of_highest, highest
from podracer.types import Array


def puct(node: Node, qtransform: QTransform, pb_c_init: Any, pb_c_base: Any) -> Array:
    """Prior and value together (Schrittwieser et al. 2020, equation 2):

    `q + p * sqrt(N) / (1 + n) * (c1 + log((N + c2 + 1) / c2))`, with q from `qtransform` and N the node's own count.
    """
    scale = jnp.sqrt(node.count) * (pb_c_init + jnp.log((node.count + pb_c_base + 1.0) / pb_c_base))
    score = qtransform(node) + scale * node.probs / (node.visits + 1)
    return first_of_highest(jnp.where(node.legal, score, ILLEGAL), node)


def improved_policy(node: Node, qtransform: QTransform) -> Array:
    """The action whose visits lag most behind the improved policy (Danihelka et al. 2022, equation 14):

    `softmax(logits + q) - n / (1 + N)`.
    """
    logits = jnp.where(node.legal, node.logits + qtransform(node), ILLEGAL)
    weights = jnp.where(node.legal, jnp.exp(logits - highest(logits, node)), 0.0)
    # All of it times the sum of the weights, so that there is one division per row.
    per_visit = jnp.sum(weights, axis=-1, keepdims=True) / (1 + jnp.sum(node.visits, axis=-1, keepdims=True))
    return first_of_highest(jnp.where(node.legal, weights - node.visits * per_visit, ILLEGAL), node)


def likely_outcome(node: Node) -> Array:
    """The chance outcome that was taken too rarely (Antonoglou et al. 2022, appendix): greatest `p / (1 + n)`."""
    return first_of_highest(jnp.where(node.legal, node.probs / (node.visits + 1), ILLEGAL), node)


def halving_score(node: Node, gumbel: Array, qtransform: QTransform, considered: Array) -> Array:
    """`gumbel + logits + q` where `considered` [B, A], else ILLEGAL: what Sequential Halving compares at the root.

    A legal action's score is at least -1e9, so that it is above any that is not considered.
    """
    score = gumbel + node.logits + qtransform(node)
    return jnp.where(considered & node.legal, jnp.maximum(score, -1e9), ILLEGAL)
