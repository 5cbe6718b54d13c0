"""Before and after a search: the root's prior with its noise, and an action drawn from the root's visits."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.core
import jax.numpy as jnp

from muzero.qvalues import ILLEGAL, TINY
from muzero.recurrent import Expansion, Prior, RootFnOutput, broken, check_array, finite, is_legal, prior
from muzero.simulate import Limits
from muzero.tree import Tree
from podracer.errors import UserError, check_number
from podracer.types import Array


class Dirichlet(NamedTuple):
    """Noise in the prior at the root."""

    key: Array
    fraction: Any  # its share
    alpha: Any  # its concentration
    over: str  # "legal" or "all" actions


def check(root: RootFnOutput, invalid_actions: Any, limits: Limits) -> Array:
    """The mask of invalid actions, [B, A] bool: those given as such, and those whose logits say so.

    Raises:
      UserError: shapes do not fit one another, there is nothing to simulate, or no action to take.
    """
    check_number("num_simulations", limits.num_simulations, minimum=1, whole=True)
    check_number("max_depth", 1 if limits.max_depth is None else limits.max_depth, minimum=1, whole=True)
    shape = jnp.shape(root.prior_logits)
    if len(shape) != 2:
        raise UserError(f"root: prior_logits has shape {list(shape)}; expected [batch, actions]. Add the batch axis.")
    check_array("root: prior_logits", root.prior_logits, shape)
    check_array("root: value", root.value, shape[:1])
    for path, leaf in jax.tree_util.tree_leaves_with_path(root.embedding):
        if jnp.shape(leaf)[:1] != shape[:1]:
            place = f"embedding{jax.tree_util.keystr(path)}"
            raise UserError(
                f"root: {place} has shape {list(jnp.shape(leaf))}; expected {shape[0]}, the batch size, to lead. "
                "Every leaf of the embedding has one entry per root."
            )
    impossible = ~is_legal(root.prior_logits)
    if invalid_actions is None:
        return impossible
    if jnp.shape(invalid_actions) != shape:
        raise UserError(
            f"invalid_actions has shape {list(jnp.shape(invalid_actions))}; expected {list(shape)}, as prior_logits. "
            "Give one mask per root."
        )
    invalid = jnp.asarray(invalid_actions).astype(bool)
    _check_some_legal(invalid)
    return invalid | impossible


def _check_some_legal(invalid: Array) -> None:
    """Refuse roots without legal actions, where the mask is known: inside of a compiled program it is not.

    There, such a tree goes through the motions of the others, and its action is 0.
    """
    if isinstance(invalid, jax.core.Tracer):
        return
    stuck = [int(row) for row in jnp.flatnonzero(jnp.all(invalid, axis=1))]
    if stuck:
        names = f"root{'s' if len(stuck) > 1 else ''} {', '.join(map(str, stuck[:5]))}{' ...' if stuck[5:] else ''}"
        raise UserError(
            f"invalid_actions leaves no action to {names}; expected at least one per root. Leave finished games out, "
            "or let them have any one action."
        )


def node(policy: Prior, root: RootFnOutput) -> Expansion:
    """The roots as nodes of the player."""
    value, strange = finite(root.value), broken(root.prior_logits, root.value)
    return Expansion(policy, value, jnp.zeros_like(value), jnp.ones_like(value), jnp.zeros_like(value), strange)


def noisy_logits(prior_logits: Any, invalid: Array, noise: Dirichlet) -> Array:
    """[B, A] log of `(1 - fraction) * prior + fraction * Dirichlet noise`, ILLEGAL where invalid.

    The noise is normalised over the legal actions, which is a Dirichlet distribution over them, and the prior too. With
    `over="all"` both are over all actions and what falls on invalid ones is lost, as in mctx.

    Raises:
      UserError: `over` is neither.
    """
    if noise.over not in ("legal", "all"):
        raise UserError(f"dirichlet_over is {noise.over!r}; expected 'legal' or 'all'. Leave it out for 'legal'.")
    excluded = invalid if noise.over == "legal" else jnp.zeros_like(invalid)
    # The logarithm of gamma variables: small concentrations would underflow. `jax.random.dirichlet` draws the same.
    alpha = jnp.broadcast_to(jnp.asarray(noise.alpha, jnp.float32), invalid.shape)
    gammas = jax.random.loggamma(noise.key, alpha, invalid.shape)
    drawn = jax.nn.softmax(jnp.where(excluded, ILLEGAL, gammas))
    known = prior(jnp.where(excluded, ILLEGAL, prior_logits)).probs
    mixed = (1 - noise.fraction) * known + noise.fraction * drawn
    return jnp.where(invalid, ILLEGAL, jnp.log(jnp.maximum(mixed, TINY)))


def draw_by_visits(key: Array, tree: Tree, temperature: Any) -> tuple[Array, Array]:
    """Actions [B] drawn by `visits ** (1 / temperature)`, and the shares of the visits [B, A]."""
    weights = tree.summary().visit_probs
    logits = jnp.log(jnp.maximum(weights, TINY))
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    logits = jnp.where(weights > 0, jnp.maximum(logits / jnp.maximum(temperature, TINY), ILLEGAL), ILLEGAL)
    return jax.random.categorical(key, logits).astype(jnp.int32), weights
