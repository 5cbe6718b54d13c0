"""What the unrolled model is trained towards, from windows of experience; every end of an episode is decided here.

Position p of a window is a time step with the decision taken there. An unroll starts at position s and follows the K
decisions after it. Until an episode ends all is plain; after that:

    terminated      the state is absorbing: value 0, reward 0, no policy; the actions are drawn at random. This holds,
                    too, where the unroll starts on the terminal observation (next-step mode has one)
    truncated       the final observation still bootstraps the values before it (the actor searched there), its own
                    decision was ignored: nothing is learnt of it, nor of anything after it
    window's end    nothing is known of the decision at its last time step: as after a truncation, except that a
                    termination there is seen, and values before it bootstrap from the last decision's

In two-player games in which the players take turns the discount is negative: what is good for who moves next is bad
for who has just moved.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podracer import returns
from podracer.types import Array, TimeStep


class Window(NamedTuple):
    """A stretch of W decisions of B sequences; the unroll of K steps starts at position `start`, start + K <= W."""

    timestep: TimeStep  # [W + 1, B], without its observation
    action: Any  # [W, B, ...]
    policy: Any  # what the search wants: [W, B, A], or Sampled [W, B, ...]
    value: Array  # [W, B] what is bootstrapped from: the search's or a network's values
    start: Array  # [B] int32


class Targets(NamedTuple):
    """What the model is compared with after k = 0..K steps. Masks are bool; False: nothing to learn."""

    value: Array  # [K + 1, B]
    policy: Any  # [K + 1, B, A], or Sampled [K + 1, B, ...]
    reward: Array  # [K, B] of the k-th step
    action: Any  # [K, B, ...] what the model is fed
    value_mask: Array  # [K + 1, B]
    policy_mask: Array  # [K + 1, B]
    reward_mask: Array  # [K, B]


class Fate(NamedTuple):
    """What has become of the episode of the start, k steps later; at most one of the two."""

    absorbed: Array  # [K + 1, B] bool, it has terminated
    cut: Array  # [K + 1, B] bool, it was truncated: this decision, or one before it, was ignored


def at(sequence: Any, start: Array, length: int) -> Any:
    """Leaves [W, B, ...] -> [length, B, ...], from position `start` [B] on."""

    def one(leaf):
        return jax.vmap(lambda own, first: jax.lax.dynamic_slice_in_dim(own, first, length), (1, 0), 1)(leaf, start)

    return jax.tree.map(one, sequence)


def terminal(timestep: TimeStep) -> Array:
    """Whether an observation is the last one of an episode that terminated (in same-step mode none is)."""
    return (timestep.discount == 0) & timestep.valid & ~timestep.first


def fate(timestep: TimeStep, start: Array, unroll_steps: int) -> Fate:
    """What ends between the start and each unrolled position."""
    here = at(timestep._replace(observation=()), start, unroll_steps + 1)
    ended = (here.discount == 0) & here.valid  # at k: by the transition that led there
    by_then = jnp.cumsum(ended[1:], 0) > 0
    absorbed = jnp.concatenate([jnp.zeros_like(ended[:1]), by_then]) | terminal(here)[:1]
    # A decision was taken where the transition after it is real; that of the last time step is not in the window.
    taken = jnp.concatenate([timestep.valid[1:], jnp.zeros_like(timestep.valid[:1])])
    ignored = ~at(taken, start, unroll_steps + 1) & ~absorbed
    cut = jnp.cumsum(ignored, 0) > 0
    return Fate(absorbed & ~cut, cut)


def value_targets(timestep: TimeStep, value: Array, discount: Array | float, steps: int, mix: Array | float) -> Array:
    """[W, B] returns of up to `steps` steps (Schrittwieser et al. 2020, section 3), or their TD(`mix`) mixture.

    Fewer steps where the episode or the window ends first. The value after the last decision is not known: that
    transition counts where it terminates an episode, else it is taken for a reset, whose target is its own value.
    """
    ends = timestep.valid[-1:] & (timestep.discount[-1:] == 0)
    timestep = timestep._replace(observation=(), valid=jnp.concatenate([timestep.valid[:-1], ends]))
    step = returns.transitions(timestep, jnp.concatenate([value, value[-1:]]), discount)
    return returns.n_step_returns(step, steps, mix)


def targets(
    window: Window,
    unroll_steps: int,
    discount: Array | float,
    td_steps: int,
    td_lambda: Array | float,
    random_action: Any,
) -> Targets:
    """Targets of all unrolled positions.

    Args:
      window: the experience.
      unroll_steps: K.
      discount: gamma; negative where two players take turns.
      td_steps: n.
      td_lambda: 1 for n-step returns; less mixes those of 1 to n steps.
      random_action: [K, B, ...] what the model is fed after an end.
    """
    timestep = window.timestep
    absorbed, cut = fate(timestep, window.start, unroll_steps)
    value = value_targets(timestep, window.value, discount, td_steps, td_lambda)
    # One more position, which the masks leave out.
    value, policy = jax.tree.map(lambda each: jnp.concatenate([each, each[-1:]]), (value, window.policy))
    reward = at(timestep.reward[1:], window.start, unroll_steps)
    dead = (absorbed | cut)[:-1]
    action = at(window.action, window.start, unroll_steps)

    def alive(mine, other):
        return jnp.where(dead.reshape(dead.shape + (1,) * (mine.ndim - 2)), other, mine)

    return Targets(
        value=jnp.where(absorbed, 0.0, at(value, window.start, unroll_steps + 1)),
        policy=at(policy, window.start, unroll_steps + 1),
        reward=jnp.where(dead, 0.0, reward),
        action=jax.tree.map(alive, action, random_action),
        value_mask=~cut,
        policy_mask=~cut & ~absorbed,
        reward_mask=~cut[:-1],
    )
