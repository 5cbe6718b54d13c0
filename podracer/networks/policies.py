"""Distributions over actions, as functions of the flat numbers [..., P] that a policy head puts out.

Small on purpose and in the acting hot path: sampling inverts the cumulative distribution with ONE uniform draw per
action, where the usual Gumbel trick draws one per action value; log-probabilities compare instead of gathering, whose
gradient is a scatter. The tests hold them to distrax's distributions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podracer.specs import Action, Continuous, Discrete, MultiDiscrete

ILLEGAL = -1e9  # a logit: finite, so that masked softmaxes have finite gradients


class Policy(NamedTuple):
    """A distribution as five functions; `numbers` is [..., num_numbers] float32."""

    num_numbers: int
    sample: Callable[[jax.Array, jax.Array], jax.Array]  # (key, numbers) -> action
    mode: Callable[[jax.Array], jax.Array]
    log_prob: Callable[[jax.Array, jax.Array], jax.Array]  # (numbers, action) -> [...]
    entropy: Callable[[jax.Array], jax.Array]


def policy(action: Action) -> Policy:
    """The distribution for an action spec: categorical, several categoricals, or a diagonal normal."""
    if isinstance(action, Discrete):
        return Policy(action.num_values, _sample, _mode, _log_prob, _entropy)
    if isinstance(action, MultiDiscrete):
        return _independent(action.num_values)
    if isinstance(action, Continuous):
        return _normal(action.size)
    raise TypeError(f"no policy for action spec {action!r}")


def mask_logits(logits: jax.Array, mask: Any | None) -> jax.Array:
    """Logits with illegal actions (`mask` False) made impossible."""
    return logits if mask is None else jnp.where(mask, logits, ILLEGAL)


def _sample(key, logits):
    """The first value whose cumulative probability passes a uniform draw; never one of probability 0."""
    weights = jnp.exp(logits - jnp.max(logits, -1, keepdims=True))
    cumulative = jnp.cumsum(weights, -1)
    # uniform < 1, so the threshold stays below the total; rounding up to it would pick no value at all.
    threshold = jax.random.uniform(key, logits.shape[:-1]) * cumulative[..., -1]
    possible, positions = weights > 0, jax.lax.broadcasted_iota(jnp.int32, weights.shape, weights.ndim - 1)
    # A parallel sum rounds each prefix on its own, so it may step up, or down, where the weight is 0: ask both.
    passed = possible & (cumulative > threshold[..., None])
    action = jnp.min(jnp.where(passed, positions, weights.shape[-1]), -1)
    # Where rounding pushed the draw past the end, the last possible value.
    return jnp.minimum(action, jnp.max(jnp.where(possible, positions, 0), -1))


def _mode(logits):
    return jnp.argmax(logits, -1).astype(jnp.int32)


def _log_softmax(logits):
    """Log-probabilities [A, ...]. Actions come first: over a last axis of two or three, CPUs do not vectorise."""
    return jax.nn.log_softmax(jnp.moveaxis(logits, -1, 0), axis=0)


def _log_prob(logits, action):
    log_probs = _log_softmax(logits)
    values = jnp.arange(logits.shape[-1]).reshape(-1, *(1,) * action.ndim)
    return jnp.sum(jnp.where(values == action[None], log_probs, 0.0), 0)


def _entropy(logits):
    log_probs = _log_softmax(logits)
    return -jnp.sum(jnp.exp(log_probs) * log_probs, 0)


def _sum(parts: list[jax.Array]) -> jax.Array:
    return sum(parts[1:], parts[0])


def _independent(num_values: tuple[int, ...]) -> Policy:
    """One categorical per component; their logits lie side by side."""
    ends = [sum(num_values[: i + 1]) for i in range(len(num_values))]

    def split(logits):
        return jnp.split(logits, ends[:-1], -1)

    def sample(key, logits):
        keys = jax.random.split(key, len(num_values))
        return jnp.stack([_sample(k, part) for k, part in zip(keys, split(logits), strict=True)], -1)

    def log_prob(logits, action):
        return _sum([_log_prob(part, action[..., i]) for i, part in enumerate(split(logits))])

    return Policy(
        sum(num_values),
        sample,
        lambda logits: jnp.stack([_mode(part) for part in split(logits)], -1),
        log_prob,
        lambda logits: _sum([_entropy(part) for part in split(logits)]),
    )


def _normal(size: int) -> Policy:
    """A diagonal normal: means, then log standard deviations. Actions are in the agent's units, not clipped here."""

    def log_prob(numbers, action):
        mean, log_std = jnp.split(numbers, 2, -1)
        deviation = (action - mean) * jnp.exp(-log_std)
        return -jnp.sum(0.5 * deviation**2 + log_std + 0.5 * math.log(2 * math.pi), -1)

    def sample(key, numbers):
        mean, log_std = jnp.split(numbers, 2, -1)
        return mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape)

    return Policy(
        2 * size,
        sample,
        lambda numbers: numbers[..., :size],
        log_prob,
        lambda numbers: jnp.sum(numbers[..., size:] + 0.5 * math.log(2 * math.pi * math.e), -1),
    )
