"""From an observation to a plan: the network behind the calling convention of mctx, and a search over it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from muzero.config import AlphaZeroConfig, Config, GumbelConfig, SampledConfig, StochasticConfig
from muzero.sampling import Sampled, Sampler
from muzero.support import Support
from podracer.networks.functional import Functional
from podracer.networks.policies import Policy, mask_logits
from podracer.types import Array


class Plan(NamedTuple):
    """What a search says of B observations."""

    action: Any  # [B, ...]
    policy: Any  # what the policy is trained towards: shares of visits or Gumbel's improved policy [B, A], or Sampled
    value: Array  # [B] of the root, after the search
    visit_entropy: Array  # [B] nats, of the root's visits: 0 where the search looked at one action only
    nonfinite_at: Array  # [B] int32, the first simulation in which the model said something that was no number, or -1
    tree: Any  # the trees themselves; of no cost where nobody looks at them


class Planner(NamedTuple):
    """A network with what its outputs mean."""

    network: Functional
    value: Support
    reward: Support  # not used where the rewards are the environment's own
    discount: Array | float  # negative where two players take turns
    actions: Policy  # what the numbers of the network's policy stand for
    outcomes: int = 0  # of chance after each action; 0: chance makes no moves


# `(planner, weights, observation [B] without its mask, legal actions [B, A] or None, key, acting) -> Plan`. `acting` is
# None to plan without any noise, else the number of learner updates so far.
Search = Callable[[Planner, Any, Any, Any, Array, Any], Plan]


def implementation(search: Literal["fast", "rounds", "mctx"]) -> ModuleType:
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
    recurrent: Callable[[Planner], Any]  # planner -> recurrent_fn, or (decision_fn, chance_fn)


LEARNT = Model(root_of, recurrent_of)


def muzero_search(config: Config | AlphaZeroConfig, model: Model = LEARNT) -> Search:
    """PUCT with Dirichlet noise and a temperature (Schrittwieser et al. 2020, appendix B)."""
    return _over_all(_puct(config), model)


def gumbel_search(
    config: GumbelConfig | AlphaZeroConfig, model: Model = LEARNT, value_range: float | None = None
) -> Search:
    """Sequential halving with Gumbel noise (Danihelka et al. 2022, sections 3 and 4).

    `value_range` takes the place of the config's.
    """
    return _over_all(_gumbel(config, value_range), model)


def sampled_search(config: SampledConfig, sampler: Sampler) -> Search:
    """Either of them over a sample of the actions, which travels in the embedding (Hubert et al. 2021).

    Without noise the same observation gets the same sample, whatever the key, and the policy's mode is in it.
    """
    tree_search = _gumbel(config) if config.rule == "gumbel" else _puct(config)

    def search(planner, weights, observation, legal, key, acting):
        sample_key, search_key = jax.random.split(key if acting is not None else jax.random.key(0))
        root = root_of(planner, weights, observation)
        explore = 0.0 if acting is None else config.exploration_fraction
        drawn = sampler.draw(sample_key, root.prior_logits, legal, explore, with_mode=acting is None)
        root = root.replace(prior_logits=drawn.logits, embedding=(root.embedding, drawn.actions))
        plan = tree_search(weights, search_key, root, _sampling(recurrent_of(planner), sampler), drawn.legal, acting)
        policy = Sampled(plan.policy, drawn.actions)
        return plan._replace(action=_pick(drawn.actions, plan.action), policy=policy)

    return search


def stochastic_search(config: StochasticConfig) -> Search:
    """PUCT with chance nodes (Antonoglou et al. 2022, section 4)."""
    return _over_all(_puct(config, "stochastic_muzero_policy"), Model(root_of, two_plies_of))


def two_plies_of(planner: Planner) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The model's two half steps, as searches with chance nodes call them: `(decision, chance)`."""

    def decide(weights, key, action, latent):
        after, said = planner.network.apply(weights, lambda module, *args: module.afterstate(*args), latent, action)
        value = planner.value.mean(said.value)
        return record("DecisionRecurrentFnOutput")(chance_logits=said.outcome, afterstate_value=value), after

    def happen(weights, key, outcome, after):
        code = jax.nn.one_hot(outcome, planner.outcomes)
        latent, reward, seen = planner.network.apply(weights, _happen, after, code)
        reward = planner.reward.mean(reward)
        output = record("ChanceRecurrentFnOutput")(
            action_logits=seen.policy,
            value=planner.value.mean(seen.value),
            reward=reward,
            discount=jnp.full_like(reward, planner.discount),
        )
        return output, latent

    return decide, happen


# `(weights, key, root, recurrent function, legal edges [B, A] or None, acting) -> Plan`, about edges.
TreeSearch = Callable[[Any, Array, Any, Any, Any, Any], Plan]


def _over_all(tree_search: TreeSearch, model: Model) -> Search:
    """A search whose edges are all actions."""

    def search(planner, weights, observation, legal, key, acting):
        root = model.root(planner, weights, observation)
        # Illegal actions are made impossible before any noise is mixed in.
        root = root.replace(prior_logits=mask_logits(root.prior_logits, legal))
        return tree_search(weights, key, root, model.recurrent(planner), legal, acting)

    return search


def _puct(config: Config | AlphaZeroConfig | SampledConfig, name: str = "muzero_policy") -> TreeSearch:
    policy = getattr(implementation(config.search), name)

    def search(weights, key, root, recurrent, legal, acting):
        output = policy(
            weights,
            key,
            root,
            *(recurrent if isinstance(recurrent, tuple) else (recurrent,)),
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


def temperature(config: Config | AlphaZeroConfig | SampledConfig, updates: Array) -> Array:
    """Three stages, as in Schrittwieser et al. 2020, appendix D: 1, 1/2 and 1/4 by default."""
    start, end = (jnp.asarray(each, jnp.float32) for each in (config.temperature_start, config.temperature_end))
    done = updates / config.temperature_updates
    return jnp.where(done < 0.5, start, jnp.where(done < 0.75, jnp.sqrt(start * end), end))


def _gumbel(config: GumbelConfig | AlphaZeroConfig | SampledConfig, value_range: float | None = None) -> TreeSearch:
    library = implementation(config.search)
    policy = library.gumbel_muzero_policy
    more = {"mode": "rounds"} if config.search == "rounds" else {}
    scaled = functools.partial(
        library.qtransform_completed_by_mix_value,
        value_scale=config.value_scale,
        epsilon=config.value_range if value_range is None else value_range,
    )

    def search(weights, key, root, recurrent, legal, acting):
        output = policy(
            weights,
            key,
            root,
            recurrent,
            config.num_simulations,
            invalid_actions=None if legal is None else ~legal,
            max_num_considered_actions=config.max_considered_actions,
            gumbel_scale=0.0 if acting is None else config.gumbel_scale,
            qtransform=scaled,
            **more,
        )
        return _plan(output)

    return search


def _sampling(recurrent: Callable, sampler: Sampler) -> Callable:
    """A model whose edges are numbers of sampled actions: `embedding` is (latent, the actions of the node's edges)."""

    def step(weights, key, edge, embedding):
        latent, actions = embedding
        output, latent = recurrent(weights, key, _pick(actions, edge), latent)
        drawn = sampler.draw(key, output.prior_logits)
        return output.replace(prior_logits=drawn.logits), (latent, drawn.actions)

    return step


def _pick(actions: Array, edge: Array) -> Array:
    """Of actions [N, K, ...] those of the edges [N]."""
    return jax.vmap(lambda own, index: own[index])(actions, edge)


def record(name: str) -> Any:
    """A record of mctx's, which both searches take."""
    return getattr(implementation("mctx"), name)


def _plan(output: Any) -> Plan:
    summary = output.search_tree.summary()
    visits = summary.visit_probs
    entropy = -jnp.sum(visits * jnp.log(jnp.maximum(visits, 1e-12)), -1)
    # mctx does not look for it.
    nonfinite_at = getattr(summary, "nonfinite_at", jnp.full(output.action.shape, -1, jnp.int32))
    action = output.action.astype(jnp.int32)
    return Plan(action, output.action_weights, summary.value, entropy, nonfinite_at, output.search_tree)


def _look(module: Any, observation: Any) -> tuple[Array, Any]:
    latent = module.represent(observation)
    return latent, module.predict(latent)


def _imagine(module: Any, latent: Array, action: Array) -> tuple[Array, Array, Any]:
    latent, reward = module.step(latent, action)
    return latent, reward, module.predict(latent)


def _happen(module: Any, after: Array, code: Array) -> tuple[Array, Array, Any]:
    latent, reward = module.happen(after, code)
    return latent, reward, module.predict(latent)
