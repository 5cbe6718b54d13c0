"""From an observation to a plan: the network behind the calling convention of mctx, and a search over it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from muzero.config import AlphaZeroConfig, Config, GumbelConfig
from muzero.support import Support
from podracer.networks.functional import Functional
from podracer.networks.policies import mask_logits
from podracer.types import Array


class Plan(NamedTuple):
    """What a search says of B observations."""

    action: Array  # [B] int32
    policy: Array  # [B, A] what the policy is trained towards: shares of visits, or Gumbel's improved policy
    value: Array  # [B] of the root, after the search
    visit_entropy: Array  # [B] nats, of the root's visits: 0 where the search looked at one action only


class Planner(NamedTuple):
    """A network with what its outputs mean."""

    network: Functional
    value: Support
    reward: Support  # not used where the rewards are the environment's own
    discount: Array | float  # negative where two players take turns


# `(planner, weights, observation [B] without its mask, legal actions [B, A] or None, key, acting) -> Plan`. `acting` is
# None to plan without any noise, else the number of learner updates so far.
Search = Callable[[Planner, Any, Any, Any, Array, Any], Plan]


def library(search: Literal["fast", "rounds", "mctx"]) -> ModuleType:
    """Who searches: both libraries have the same functions. Imported late, as they take long to import."""
    return importlib.import_module("mctx" if search == "mctx" else "muzero.search")


def root_of(planner: Planner, weights: Any, observation: Any) -> Any:
    """The network's own opinion of observations [B], as `mctx.RootFnOutput`."""
    latent, seen = planner.network.apply(weights, _look, observation)
    return record("RootFnOutput")(prior_logits=seen.policy, value=planner.value.mean(seen.value), embedding=latent)


def recurrent_of(planner: Planner) -> Callable[..., Any]:
    """The model's step, as searches call it.

    A model never says that an episode has ended: after its end it has learnt rewards and values of 0.
    """
    make = record("RecurrentFnOutput")

    def recurrent(weights, key, action, latent):
        latent, reward, seen = planner.network.apply(weights, _imagine, latent, action)
        reward = planner.reward.mean(reward)
        output = make(
            reward=reward,
            discount=jnp.full_like(reward, planner.discount),
            prior_logits=seen.policy,
            value=planner.value.mean(seen.value),
        )
        return output, latent

    return recurrent


class Model(NamedTuple):
    """What a search plans with: the learnt model, or the environment itself."""

    root: Callable[[Planner, Any, Any], Any]  # (planner, weights, observation [B]) -> mctx.RootFnOutput
    recurrent: Callable[[Planner], Callable[..., Any]]  # planner -> recurrent_fn


LEARNT = Model(root_of, recurrent_of)


def muzero_search(config: Config | AlphaZeroConfig, model: Model = LEARNT) -> Search:
    """PUCT with Dirichlet noise and a temperature (Schrittwieser et al. 2020, appendix B)."""
    policy = library(config.search).muzero_policy

    def search(planner, weights, observation, legal, key, acting):
        output = policy(
            weights,
            key,
            _masked(model.root(planner, weights, observation), legal),
            model.recurrent(planner),
            config.num_simulations,
            invalid_actions=None if legal is None else ~legal,
            dirichlet_fraction=0.0 if acting is None else config.dirichlet_fraction,
            dirichlet_alpha=config.dirichlet_alpha,
            pb_c_init=config.pb_c_init,
            pb_c_base=config.pb_c_base,
            temperature=1.0 if acting is None else temperature(config, acting),
        )
        plan = _plan(output)
        return plan if acting is not None else plan._replace(action=jnp.argmax(plan.policy, -1).astype(jnp.int32))

    return search


def temperature(config: Config | AlphaZeroConfig, updates: Array) -> Array:
    """Three stages, as in Schrittwieser et al. 2020, appendix D: 1, 1/2 and 1/4 by default."""
    start, end = (jnp.asarray(each, jnp.float32) for each in (config.temperature_start, config.temperature_end))
    done = updates / config.temperature_updates
    return jnp.where(done < 0.5, start, jnp.where(done < 0.75, jnp.sqrt(start * end), end))


def gumbel_search(
    config: GumbelConfig | AlphaZeroConfig, model: Model = LEARNT, qtransform: Callable | None = None
) -> Search:
    """Sequential halving with Gumbel noise (Danihelka et al. 2022, sections 3 and 4).

    `qtransform` takes the place of the default, which stretches the Q-values of each node to [0, 1].
    """
    policy = library(config.search).gumbel_muzero_policy
    more = {"mode": "rounds"} if config.search == "rounds" else {}
    more |= {} if qtransform is None else {"qtransform": qtransform}

    def search(planner, weights, observation, legal, key, acting):
        output = policy(
            weights,
            key,
            _masked(model.root(planner, weights, observation), legal),
            model.recurrent(planner),
            config.num_simulations,
            invalid_actions=None if legal is None else ~legal,
            max_num_considered_actions=config.max_considered_actions,
            gumbel_scale=0.0 if acting is None else config.gumbel_scale,
            **more,
        )
        return _plan(output)

    return search


def record(name: str) -> Any:
    """A record of mctx's, which both searches take."""
    return getattr(library("mctx"), name)


def _masked(root: Any, legal: Array | None) -> Any:
    """Illegal actions made impossible before any noise is mixed in."""
    return root.replace(prior_logits=mask_logits(root.prior_logits, legal))


def _plan(output: Any) -> Plan:
    summary = output.search_tree.summary()
    visits = summary.visit_probs
    entropy = -jnp.sum(visits * jnp.log(jnp.maximum(visits, 1e-12)), -1)
    return Plan(output.action.astype(jnp.int32), output.action_weights, summary.value, entropy)


def _look(module: Any, observation: Any) -> tuple[Array, Any]:
    latent = module.represent(observation)
    return latent, module.predict(latent)


def _imagine(module: Any, latent: Array, action: Array) -> tuple[Array, Array, Any]:
    latent, reward = module.step(latent, action)
    return latent, reward, module.predict(latent)
