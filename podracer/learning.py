"""What every agent's update shares: the gradient step, the optimizer, annealing, minibatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from podracer import mesh
from podracer.errors import unknown
from podracer.types import Array, Metrics

OptimizerName = Literal["adam", "radam", "rmsprop", "sgd"]


class Learner(NamedTuple):
    """What a gradient step changes."""

    weights: Any
    opt_state: Any


def optimizer(name: OptimizerName, max_grad_norm: float | None, epsilon: float) -> optax.GradientTransformation:
    """Clipping by global norm, then the optimizer, without the learning rate (`gradient_step` applies it).

    All leaves are handled as one vector: a small network has a dozen leaves, and a dozen tiny programs per step
    cost more than the arithmetic.
    """
    rules = {
        "adam": lambda: optax.scale_by_adam(eps=epsilon),
        "radam": lambda: optax.scale_by_radam(eps=epsilon),
        "rmsprop": lambda: optax.scale_by_rms(decay=0.99, eps=epsilon, eps_in_sqrt=False),
        "sgd": optax.identity,
    }
    if name not in rules:
        raise unknown("optimizer", str(name), rules, f"Expected one of {', '.join(rules)}.")
    clip = optax.identity() if max_grad_norm is None else optax.clip_by_global_norm(max_grad_norm)
    return optax.flatten(optax.chain(clip, rules[name]()))


def anneal(start: Array | float, updates: Array, steps_per_update: int, total_steps: int | None) -> Array:
    """`start`, falling linearly to 0 over `total_steps` decisions; constant where that is None."""
    if total_steps is None:
        return jnp.asarray(start, jnp.float32)
    done = updates.astype(jnp.float32) * (steps_per_update / total_steps)
    return start * jnp.maximum(1.0 - done, 0.0)


def mean_weights(mask: Array, axis_name: str | None) -> Array:
    """Weights w with `mean over cores of sum(w * x)` = mean of x where `mask`, over all cores.

    Losses are sums with these weights. Dividing by each core's own count instead would weigh cores with many
    masked steps too much, and 8 cores would not equal 1.
    """
    return mask.astype(jnp.float32) * mean_scale(mask, axis_name)


def mean_scale(mask: Array, axis_name: str | None) -> Array:
    """[] what `mean_weights` are where `mask`."""
    count = mesh.total(jnp.sum(mask, dtype=jnp.float32), axis_name)
    return mesh.num_cores(axis_name) / jnp.maximum(count, 1.0)


def gradient_step(
    loss: Callable[[Any], tuple[Array, Metrics]],
    learner: Learner,
    rule: optax.GradientTransformation,
    learning_rate: Array | float,
    axis_name: str | None,
) -> tuple[Learner, Metrics]:
    """One step down the gradient of `loss(weights) -> (scalar, metrics)`, averaged over the cores.

    A step whose gradient is not finite is not taken: the weights stay as they were, and the metric
    `nonfinite_updates` says so. What happens then (stop or go on) is for the architecture to decide.
    """
    (value, metrics), gradients = jax.value_and_grad(loss, has_aux=True)(learner.weights)
    gradients = mesh.mean(gradients, axis_name)
    norm = optax.global_norm(gradients)
    finite = jnp.isfinite(norm)
    updates, opt_state = rule.update(gradients, learner.opt_state, learner.weights)
    weights = jax.tree.map(lambda w, u: jnp.where(finite, w - learning_rate * u, w), learner.weights, updates)
    opt_state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), opt_state, learner.opt_state)
    metrics = {**metrics, "loss": value, "gradient_norm": norm, "nonfinite_updates": 1.0 - finite}
    return Learner(weights, opt_state), metrics


def permutation(key: Array, size: int) -> Array:
    """A random order of `size` samples, [size] int32, by the swap-or-not shuffle (Hoang, Morris and Rogaway 2012).

    `jax.random.permutation` sorts, which takes a CPU a quarter of a whole PPO update; this takes 60 times less. In each
    round every x has one partner, `offset - x`, and a hash of the pair says whether the two change places. After 12
    rounds no statistic tells the result from a uniform permutation; 24 leave a margin.
    """
    draws = jax.random.bits(key, (24, 2), jnp.uint32)

    def swap_or_not(x, draw):
        offset, salt = draw[0] % jnp.uint32(size), draw[1]
        partner = jnp.where(x <= offset, offset - x, offset - x + jnp.uint32(size))
        swap = _scramble(jnp.maximum(x, partner) ^ salt) & 1
        return jnp.where(swap == 1, partner, x), None

    order, _ = jax.lax.scan(swap_or_not, jnp.arange(size, dtype=jnp.uint32), draws)
    return order.astype(jnp.int32)


def _scramble(x: Array) -> Array:
    """A hash of uint32 with good low bits (Wellons' "lowbias32")."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def minibatch_epochs(
    step: Callable[[Learner, Any, Any], tuple[Learner, Metrics]],
    learner: Learner,
    batch: Any,
    statistics: Callable[[Any], Any],
    key: Array,
    epochs: int,
    minibatches: int,
) -> tuple[Learner, Metrics]:
    """Shuffle `batch` (leaves [T, N, ...], along N) each epoch and take one step per minibatch.

    Args:
      step: `(learner, minibatch, its statistics) -> (learner, metrics)`.
      batch: leaves [T, N, ...]; N must divide by `minibatches`.
      statistics: a few numbers of one minibatch, over all cores; computed for all minibatches of all epochs at once,
        so that they cost one collective and not one per step.

    Returns:
      The learner, and the metrics averaged over all steps (`nonfinite_updates`: summed).
    """
    size = jax.tree.leaves(batch)[0].shape[1]

    def rows(leaf, order):
        flat = leaf.reshape(*leaf.shape[:2], -1)
        return flat[:, order].reshape(leaf.shape[0], -1, *leaf.shape[2:])

    def minibatch(order):
        return jax.tree.map(lambda leaf: rows(leaf, order), batch)

    orders = jax.vmap(lambda key: permutation(key, size))(jax.random.split(key, epochs))
    orders = orders.reshape(epochs * minibatches, -1)
    inputs = (orders, jax.vmap(lambda order: statistics(minibatch(order)))(orders))
    # Minibatches are gathered one by one: a shuffled copy of everything would leave the cache before it is used.
    learner, metrics = jax.lax.scan(lambda learner, x: step(learner, minibatch(x[0]), x[1]), learner, inputs)
    skipped = jnp.sum(metrics["nonfinite_updates"])
    return learner, {**jax.tree.map(jnp.mean, metrics), "nonfinite_updates": skipped}
