"""The user's model in the form that the search calls, and a check of it with named errors.

`recurrent_fn(params, rng_key, action [L], embedding [L, ...]) -> (RecurrentFnOutput, embedding [L, ...])`, as mctx has
it. L is the batch size, or a multiple of it where a search evaluates several leaves at once, so the function must not
assume one. The records are mctx's own: a model written for mctx is searched here unchanged, and the other way round.

Whatever the model returns, the tree stays finite: logits below -5e29 (`-inf`, or the least float) mean that there is no
such action. Those that are NaN or `+inf` mean so too, and rewards, discounts and values that are not finite count as 0,
but then the model is broken, and `nonfinite_at` in the summary of the tree says in which simulation that showed first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from mctx import ChanceRecurrentFnOutput, DecisionRecurrentFnOutput, RecurrentFnOutput, RootFnOutput

from muzero.qvalues import ILLEGAL
from podracer.errors import UserError
from podracer.types import Array

__all__ = [
    "ChanceRecurrentFnOutput",
    "DecisionRecurrentFnOutput",
    "Expansion",
    "Prior",
    "RecurrentFnOutput",
    "RootFnOutput",
    "TwoPlies",
    "check_recurrent_fn",
    "deterministic",
    "prior",
    "stochastic",
]


class Prior(NamedTuple):
    """A policy over W edges, those that do not exist included."""

    logits: Array  # [L, W] log-probabilities; ILLEGAL where there is no such action
    probs: Array  # [L, W]


class Expansion(NamedTuple):
    """What the model says of L new nodes."""

    prior: Prior
    value: Array  # [L]
    reward: Array  # [L] for the edge that leads here
    discount: Array  # [L] of the value
    chance: Array  # [L] 1 where the node is a chance node
    broken: Array  # [L] bool, something that the model said was no number


Expand = Callable[[Array, Array, Any], tuple[Expansion, Any]]  # (rng_key, action [L], embedding) -> ..., embedding


def prior(logits: Any, width: int | None = None) -> Prior:
    """Logits [L, A] in float32, normalised, ILLEGAL for what is not finite or very low; padded to `width`."""
    logits = jnp.asarray(logits, jnp.float32)
    legal = is_legal(logits)
    top = jnp.max(jnp.where(legal, logits, ILLEGAL), axis=-1, keepdims=True)
    shifted = logits - jnp.where(top > ILLEGAL / 2, top, 0.0)
    weights = jnp.where(legal, jnp.exp(shifted), 0.0)
    total = jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1.0)
    found = Prior(jnp.where(legal, shifted - jnp.log(total), ILLEGAL), weights / total)
    padding = ((0, 0), (0, 0 if width is None else width - logits.shape[-1]))
    return Prior(jnp.pad(found.logits, padding, constant_values=ILLEGAL), jnp.pad(found.probs, padding))


def is_legal(logits: Any) -> Array:
    """Bool, as `logits`: False where they are very low, or no number."""
    logits = jnp.asarray(logits, jnp.float32)
    return (logits > ILLEGAL / 2) & (logits < jnp.inf)  # both False for NaN


def finite(values: Any) -> Array:
    """`values` in float32, 0 where they are NaN or infinite."""
    values = jnp.asarray(values, jnp.float32)
    return jnp.where(jnp.isfinite(values), values, 0.0)


def broken(logits: Any, *numbers: Any) -> Array:
    """[L] where logits [L, A] are NaN or `+inf` (`-inf` has a meaning), or numbers [L] are not finite."""
    found = ~jnp.all(jnp.asarray(logits, jnp.float32) < jnp.inf, axis=-1)
    for each in numbers:
        found |= ~jnp.isfinite(jnp.asarray(each, jnp.float32))
    return found


def deterministic(recurrent_fn: Callable, params: Any, num_actions: int) -> Expand:
    """A model whose every node is the player's."""

    def expand(rng_key, action, embedding):
        result = recurrent_fn(params, rng_key, action, embedding)
        _check(result, RECURRENT, "recurrent_fn", action.shape[0], num_actions, embedding)
        out, new = result
        value = finite(out.value)
        reward, discount = finite(out.reward), finite(out.discount)
        strange = broken(out.prior_logits, out.value, out.reward, out.discount)
        return Expansion(prior(out.prior_logits), value, reward, discount, jnp.zeros_like(value), strange), new

    return expand


class TwoPlies(NamedTuple):
    """A model whose nodes are the player's and chance's in turn."""

    expand: Expand
    embedding: Any  # of the root: (state, afterstate, decision [B] bool)
    width: int  # edges of a node, the greater of the numbers of actions and outcomes


def stochastic(decision_fn: Callable, chance_fn: Callable, params: Any, root: Any) -> TwoPlies:
    """Decision and chance functions as one model (Antonoglou et al. 2022, section 4).

    Both are called on all nodes, on whatever lies in the half of the embedding that is not theirs, and the right answer
    is taken: one batch, whatever mixture the leaves are.
    """
    batch, num_actions = root.prior_logits.shape
    action, key = jax.ShapeDtypeStruct((batch,), jnp.int32), jax.eval_shape(lambda: jax.random.PRNGKey(0))
    said = jax.eval_shape(decision_fn, params, key, action, root.embedding)
    _check_record(said, DECISION, "decision_recurrent_fn")
    after, afterstate = said
    num_outcomes = (jnp.shape(after.chance_logits) or (0,))[-1]
    _check(said, DECISION, "decision_recurrent_fn", batch, num_outcomes, afterstate)
    width = max(num_actions, num_outcomes)

    def expand(rng_key, index, embedding):
        state, afterstate, decision = embedding
        size = index.shape[0]
        after = decision_fn(params, rng_key, jnp.minimum(index, num_actions - 1), state)
        _check(after, DECISION, "decision_recurrent_fn", size, num_outcomes, afterstate)
        then = chance_fn(params, rng_key, jnp.minimum(index, num_outcomes - 1), afterstate)
        _check(then, CHANCE, "chance_recurrent_fn", size, num_actions, state)
        (after, new_afterstate), (then, new_state) = after, then
        outcomes, actions = prior(after.chance_logits, width), prior(then.action_logits, width)
        expansion = Expansion(
            jax.tree.map(partial(jnp.where, decision[:, None]), outcomes, actions),
            jnp.where(decision, finite(after.afterstate_value), finite(then.value)),
            jnp.where(decision, 0.0, finite(then.reward)),
            jnp.where(decision, 1.0, finite(then.discount)),
            decision.astype(jnp.float32),
            jnp.where(
                decision,
                broken(after.chance_logits, after.afterstate_value),
                broken(then.action_logits, then.value, then.reward, then.discount),
            ),
        )
        return expansion, (new_state, new_afterstate, ~decision)

    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), afterstate)
    return TwoPlies(expand, (root.embedding, nothing, jnp.ones(batch, bool)), width)


# Field names, the one with the logits first.
RECURRENT = ("prior_logits", "reward", "discount", "value")
DECISION = ("chance_logits", "afterstate_value")
CHANCE = ("action_logits", "value", "reward", "discount")


def check_recurrent_fn(recurrent_fn: Callable, params: Any, root: Any, name: str = "recurrent_fn") -> None:
    """Call the model on shapes only, and say which part of its answer does not fit `root` (a `RootFnOutput`).

    The policies check the same while they are traced; this is for a message before anything else is set up.

    Raises:
      UserError: a field has another shape or dtype than expected, or the embedding differs from the root's.
    """
    batch, num_actions = root.prior_logits.shape
    action, key = jax.ShapeDtypeStruct((batch,), jnp.int32), jax.eval_shape(lambda: jax.random.PRNGKey(0))
    embedding = jax.eval_shape(lambda x: x, root.embedding)
    result = jax.eval_shape(recurrent_fn, params, key, action, embedding)
    _check(result, RECURRENT, name, batch, num_actions, embedding)


def _check(result: Any, fields: tuple[str, ...], name: str, batch: int, width: int, embedding: Any) -> None:
    """Compare the answer of a recurrent function with what the tree can hold."""
    _check_record(result, fields, name)
    output, new = result
    for field in fields:
        value, shape = getattr(output, field), (batch, width) if field == fields[0] else (batch,)
        check_array(f"{name}: {field}", value, shape)
    check_embedding(name, new, embedding)


def _check_record(result: Any, fields: tuple[str, ...], name: str) -> None:
    """Refuse what is not a pair of a record with these fields and an embedding."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise UserError(
            f"{name} returned {type(result).__name__}; expected a pair (output, new embedding). Return both."
        )
    for field in fields:
        if not hasattr(result[0], field):
            raise UserError(
                f"{name}: the output, a {type(result[0]).__name__}, has no field '{field}'; "
                f"expected {', '.join(fields)}. Return the record of muzero.search for it."
            )


def check_array(name: str, value: Any, shape: tuple[int, ...]) -> None:
    """Refuse what is not a float array of `shape`.

    Raises:
      UserError: another shape or dtype.
    """
    got, dtype = getattr(value, "shape", None), getattr(value, "dtype", type(value).__name__)
    if got != shape or not jnp.issubdtype(dtype, jnp.floating):
        raise UserError(
            f"{name} is {dtype}{list(got or ())}; expected floats of shape {list(shape)}. Change the model."
        )


def check_embedding(name: str, new: Any, old: Any) -> None:
    """Refuse an embedding that does not fit where the root's was stored.

    Raises:
      UserError: another structure, shape or dtype.
    """
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise UserError(
            f"{name}: the embedding is {jax.tree.structure(new)}; expected the root's structure, "
            f"{jax.tree.structure(old)}. Return an embedding like the one that was given."
        )
    for (path, leaf), expected in zip(jax.tree_util.tree_leaves_with_path(new), jax.tree.leaves(old), strict=True):
        got, want = (jnp.shape(leaf), jnp.result_type(leaf)), (jnp.shape(expected), jnp.result_type(expected))
        if got != want:
            place = f"embedding{jax.tree_util.keystr(path)}"
            raise UserError(
                f"{name}: {place} is {got[1]}{list(got[0])}; expected {want[1]}{list(want[0])} as at the root. "
                "Cast or reshape it in the model."
            )
