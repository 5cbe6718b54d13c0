"""The loss of one batch of unrolls (Schrittwieser et al. 2020, section 3 and appendix G)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from muzero import chance as chance_of
from muzero.chance import Chance, code_of, spread
from muzero.planning import Planner
from muzero.sampling import imitation, weights_of
from muzero.support import cross_entropy
from muzero.targets import Targets
from podracer.networks.policies import mask_logits
from podracer.types import Array, Metrics


class Costs(NamedTuple):
    """Weights of the parts of the loss beside the policy's, which has 1."""

    value: Array | float
    reward: Array | float
    consistency: Array | float | None = None  # None: no such loss
    entropy: Array | float = 0.0  # of the bonus for the policy's entropy
    outcome: Array | float = 0.0  # where chance moves, as the next
    commitment: Array | float = 0.0


class Unroll(NamedTuple):
    """What the model says after k = 0..K steps."""

    policy: Array  # [K + 1, B, P] numbers of the policy: logits, for discrete actions
    value: Array  # [K + 1, B, value bins] logits
    reward: Any  # [K, B, reward bins] logits; () where K is 0
    latent: Array  # [K + 1, B, ...]
    chance: Chance | None = None  # where chance moves


def halved(latent: Array) -> Array:
    """The same latent, half of whose gradient stops here, so that K steps of dynamics do not add up (appendix G)."""
    return 0.5 * latent + jax.lax.stop_gradient(0.5 * latent)


def unroll(module: Any, observation: Any, action: Any) -> Unroll:
    """Unroll the model from observations [B, ...] along actions [K, B, ...]."""

    def step(latent, action):
        latent, reward = module.step(halved(latent), action)
        return latent, (latent, reward)

    first = module.represent(observation)
    latents, reward = first[None], ()
    if jax.tree.leaves(action)[0].shape[0]:
        _, (following, reward) = jax.lax.scan(step, first, action)
        latents = jnp.concatenate([latents, following])
    return _judged(module, latents, reward)


def unroll_with_chance(module: Any, observation: Any, following: Any, alive: Array, action: Any) -> Unroll:
    """The same where chance moves after each action [K, B, ...], as the observations `following` [K, B, ...] show.

    `alive` [K, B]: where the step was taken. Where it was not, as after the end of an episode, what is observed belongs
    to another episode: as good as any outcome, but the encoder learns nothing of it.
    """
    observed = jax.tree.map(lambda now, then: jnp.concatenate([now[None], then]), observation, following)
    latents = module.represent(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), observed))
    latents = latents.reshape(alive.shape[0] + 1, alive.shape[1], *latents.shape[1:])
    before, after = (part.reshape(-1, *part.shape[2:]) for part in (latents[:-1], latents[1:]))
    numbers = spread(module.encode(before, after).reshape(*alive.shape, -1), alive)
    numbers = jnp.where(alive[..., None], numbers, jax.lax.stop_gradient(numbers))
    code = code_of(numbers)

    def step(latent, moved_by):
        action, code = moved_by
        afterstate, said = module.afterstate(halved(latent), action)
        latent, reward = module.happen(afterstate, code)
        return latent, (latent, reward, said)

    _, (unrolled, reward, said) = jax.lax.scan(step, latents[0], (action, code))
    seen = _judged(module, jnp.concatenate([latents[:1], unrolled]), reward)
    return seen._replace(chance=Chance(said, code, numbers))


def _judged(module: Any, latents: Array, reward: Any) -> Unroll:
    """The heads see all steps at once: one large product instead of K + 1 small ones."""
    seen = module.predict(latents.reshape(-1, *latents.shape[2:]))
    policy, value = (leaf.reshape(*latents.shape[:2], -1) for leaf in seen)
    return Unroll(policy, value, reward, latents)


def loss(
    planner: Planner,
    weights: Any,
    observation: Any,
    following: Any,
    targets: Targets,
    sample_weight: Array,
    costs: Costs,
    legal: Any = None,
) -> tuple[Array, Metrics]:
    """The loss of B unrolls.

    Args:
      planner: the network and its supports.
      weights: its parameters.
      observation: [B, ...] at the start.
      following: [K, B, ...] the observations after each step, for the consistency loss and where chance moves; else
        None.
      targets: of the unrolls.
      sample_weight: [B] with which each unroll counts (`learning.mean_weights`, importance). Steps after the first
        count 1/K each.
      costs: weights of the parts.
      legal: [K + 1, B, A] bool, which actions there are: the entropy is over those. None: all.

    Returns:
      The loss, and its metrics: scalars, and `start_value` [B], the network's at the start.
    """
    steps = targets.reward.shape[0]
    if planner.outcomes:
        alive = targets.policy_mask[:-1]
        seen = planner.network.apply(weights, unroll_with_chance, observation, following, alive, targets.action)
    else:
        seen = planner.network.apply(weights, unroll, observation, targets.action)
    scale = jnp.concatenate([jnp.ones(1), jnp.full(steps, 1.0 / max(steps, 1))])[:, None] * sample_weight[None]

    def mean(values, mask, scale):
        return jnp.sum(jnp.where(mask, values * scale, 0.0))

    value_target = planner.value.two_hot(targets.value)
    parts = {
        "policy_loss": mean(imitation(planner.actions, targets.policy, seen.policy), targets.policy_mask, scale),
        "value_loss": mean(cross_entropy(value_target, seen.value), targets.value_mask, scale),
    }
    total = parts["policy_loss"] + costs.value * parts["value_loss"]
    if steps:
        reward_target = planner.reward.two_hot(targets.reward)
        parts["reward_loss"] = mean(cross_entropy(reward_target, seen.reward), targets.reward_mask, scale[1:])
        total = total + costs.reward * parts["reward_loss"]
    entropy = planner.actions.entropy(mask_logits(seen.policy, legal))
    total -= costs.entropy * mean(entropy, targets.policy_mask, scale)
    if costs.consistency is not None:
        distance = consistency(planner, weights, seen.latent[1:], following)
        parts["consistency_loss"] = mean(distance, targets.policy_mask[1:], scale[1:])
        total = total + costs.consistency * parts["consistency_loss"]
    if seen.chance is not None:
        masks = {"afterstate_loss": targets.value_mask[:-1]}
        for name, each in chance_of.losses(seen.chance, value_target[:-1]).items():
            parts[name] = mean(each, masks.get(name, targets.policy_mask[:-1]), scale[1:])
        total += costs.outcome * parts["outcome_loss"] + costs.commitment * parts["commitment_loss"]
        total += costs.value * parts["afterstate_loss"]
    value = planner.value.mean(seen.value[0])
    return total, {**parts, **_metrics(planner, seen, targets, value, entropy[0], sample_weight), "start_value": value}


def consistency(planner: Planner, weights: Any, latent: Array, following: Any) -> Array:
    """[K, B] minus the cosine between unrolled latents [K, B, ...] and those of the observations that came.

    No gradient flows into the latter (Ye et al. 2021, section 4.1).
    """

    def compare(module, latent, following):
        flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), (latent, following))
        ours = module.project(flat[0], predict=True)
        theirs = jax.lax.stop_gradient(module.project(module.represent(flat[1]), predict=False))
        return -jnp.sum(_normed(ours) * _normed(theirs), -1).reshape(latent.shape[:2])

    return planner.network.apply(weights, compare, latent, following)


def _normed(vectors: Array) -> Array:
    return vectors * jax.lax.rsqrt(jnp.sum(vectors**2, -1, keepdims=True) + 1e-8)


def _metrics(
    planner: Planner, seen: Unroll, targets: Targets, value: Array, entropy: Array, sample_weight: Array
) -> Metrics:
    """Numbers of a batch. Those over all steps are means of the core's own batch."""
    wanted = weights_of(targets.policy)[0]
    alive = jnp.where(targets.policy_mask[0], sample_weight, 0.0)

    def share(clipped, mask):
        return jnp.sum(clipped & mask) / jnp.maximum(jnp.sum(mask), 1)

    def size(latent):
        return jnp.mean(jnp.sqrt(jnp.mean(latent.reshape(latent.shape[0], -1) ** 2, -1)))

    metrics = {
        "policy_entropy": jnp.sum(alive * entropy),
        "target_entropy": jnp.sum(-alive * jnp.sum(wanted * jnp.log(wanted + 1e-12), -1)),
        "value": jnp.sum(alive * value),
        "value_clipped": share(planner.value.clipped(targets.value), targets.value_mask),
        "latent_size": size(seen.latent[0]),
    }
    if targets.reward.shape[0]:  # something was unrolled
        metrics["reward_clipped"] = share(planner.reward.clipped(targets.reward), targets.reward_mask)
        metrics["latent_size_unrolled"] = size(seen.latent[-1])
    if seen.chance is not None:
        metrics["outcomes_used"] = chance_of.outcomes_used(seen.chance.code, targets.policy_mask[:-1])
    return metrics
