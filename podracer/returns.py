"""Returns and advantages over trajectories [T, B]; rlax does the recursions.

Every function takes the T + 1 time steps' rewards, discounts and `valid` flags in the form of `Transitions`, in which
resets have been made harmless: a masked transition gets its own value as reward and discount 0, so that its
temporal-difference error is exactly 0 and nothing passes through it. A transition before it then bootstraps from the
value of the true final observation, which is what a truncated episode needs; a terminated one has discount 0 anyway.

rlax is imported where it is used: with all that it imports itself it takes a second, which `podracer --help` can spare.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podracer.types import Array, TimeStep


class Transitions(NamedTuple):
    """What leads from time step t to t + 1."""

    reward: Array  # [T, B]
    discount: Array  # [T, B] the environment's discount times the agent's gamma; 0 across episodes
    value: Array  # [T, B] value at t
    next_value: Array  # [T, B] value at t + 1
    valid: Array  # [T, B] bool; False: a reset, nothing to learn from


def transitions(timestep: TimeStep, values: Array, discount: Array | float, reward_scale: Array | float = 1.0):
    """`Transitions` of `timestep` [T + 1, B] with `values` [T + 1, B], resets made harmless.

    In same-step mode (`first` and `valid` both set) the discount is already 0, so no value crosses episodes.
    """
    valid = timestep.valid[1:]
    reward = jnp.where(valid, timestep.reward[1:] * reward_scale, jax.lax.stop_gradient(values[:-1]))
    return Transitions(reward, jnp.where(valid, timestep.discount[1:] * discount, 0.0), values[:-1], values[1:], valid)


def gae(step: Transitions, lambda_: Array | float) -> Array:
    """Generalised advantage estimates [T, B] (Schulman et al. 2016, equation 16); 0 at masked transitions."""
    values = jnp.concatenate([step.value, step.next_value[-1:]])
    import rlax

    function = _over_batch(rlax.truncated_generalized_advantage_estimation, (1, 1, None, 1))
    return function(step.reward, step.discount, lambda_, values)


def lambda_returns(step: Transitions, lambda_: Array | float) -> Array:
    """TD(lambda) returns [T, B] (Sutton and Barto 2018, section 12.1); the own value at masked transitions."""
    import rlax

    function = _over_batch(rlax.lambda_returns, (1, 1, 1, None))
    return function(step.reward, step.discount, step.next_value, _float(lambda_))


def n_step_returns(step: Transitions, n: int, lambda_: Array | float = 1.0) -> Array:
    """n-step bootstrapped returns [T, B]; fewer than n steps at the end of the unroll.

    `n` >= T bootstraps once, at the end of the unroll, as A2C does. With `lambda_` < 1 it is the TD(lambda) mixture of
    the returns of 1 to n steps.
    """
    length = step.reward.shape[0]
    if n >= length:
        return lambda_returns(step, lambda_)
    import rlax

    def returns(reward, discount, value):
        return rlax.n_step_bootstrapped_returns(reward, discount, value, n, _float(lambda_))

    return _over_batch(returns, (1, 1, 1))(step.reward, step.discount, step.next_value)


class VTrace(NamedTuple):
    """V-trace targets and policy-gradient advantages (Espeholt et al. 2018, section 4.1)."""

    target: Array  # [T, B] v_s, what the value is regressed to
    advantage: Array  # [T, B] rho_s (r_s + gamma v_{s+1} - V(x_s))


def vtrace(
    step: Transitions,
    log_rho: Array,
    lambda_: Array | float = 1.0,
    clip_rho: float = 1.0,
    clip_pg_rho: float = 1.0,
) -> VTrace:
    """V-trace from `log_rho` [T, B], the log of target over behaviour probability of each action."""

    import rlax

    def one(value, next_value, reward, discount, rho):
        return rlax.vtrace_td_error_and_advantage(
            value, next_value, reward, discount, rho, _float(lambda_), clip_rho, clip_pg_rho
        )

    rho = jnp.where(step.valid, jnp.exp(log_rho), 1.0)
    out = jax.vmap(one, 1, 1)(step.value, step.next_value, step.reward, step.discount, rho)
    return VTrace(jax.lax.stop_gradient(out.errors + step.value), jax.lax.stop_gradient(out.pg_advantage))


def _over_batch(function: Callable[..., Any], axes: tuple[int | None, ...]) -> Callable[..., Array]:
    """`function` of one environment's sequences [T], over all of [T, B]."""
    return jax.vmap(function, axes, 1)


def _float(number: Array | float) -> Array:
    """rlax refuses Python integers, but a lambda of 1 is a lambda."""
    return jnp.asarray(number, jnp.float32)
