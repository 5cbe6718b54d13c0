"""AlphaZero: plans with the environment itself, for one player or two (Silver et al. 2018; Danihelka et al. 2022).

What the tree holds at a node is the environment's state. A simulation steps the true environment, so that rewards,
ends and legal actions are exact at every depth, and the network says only how good a state is and what to try there.
In games by turns a value belongs to who moves at the node, so that it changes its sign on every edge.

The randomness of a simulation is the search's own: what a die will show is not known beforehand. Each edge is drawn
once. What lies hidden in the state (a deck already shuffled) is seen, though: AlphaZero is for games with all in view.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from muzero import planning
from muzero.agent import Params, assemble
from muzero.config import AlphaZeroConfig
from muzero.model import network as default_network
from muzero.planning import Model, Plan, Planner
from podracer import config as _config
from podracer import envs
from podracer.agents.common import normalised
from podracer.errors import UserError
from podracer.networks.policies import mask_logits
from podracer.specs import STATE, Spec, action_mask, features
from podracer.types import Agent, Array


class Node(NamedTuple):
    """What the search keeps of L nodes."""

    state: tuple  # [L, ...] the environment's state, as `envs.WithState` puts it into observations
    over: Array  # [L] bool, the game has ended here or before


@_config.played_in(envs.with_state)
def alphazero(spec: Spec, config: AlphaZeroConfig = AlphaZeroConfig(), network: Callable = default_network()) -> Agent:
    """AlphaZero for any environment that can be compiled and has discrete actions.

    Args:
      spec: of an `envs.WithState`.
      config: its settings; `rule` chooses the search.
      network: as for `muzero.muzero`, of which only `represent` and `predict` are used.

    Raises:
      UserError: the spec has no model, the actions are not discrete, or the network does not fit.
    """
    if spec.model is None:
        raise UserError(
            f"alphazero plans with the environment itself, but the spec of {spec.name} has no model. Make the "
            "environment envs.with_state(env), and the agent for its spec."
        )
    model = environment_model(spec)
    if config.rule == "gumbel":
        # Values of games of two are known to lie in a range. Stretched to that of each node, moves that are as good as
        # one another would be told apart by the noise of their values; policies then become certain of one of them, and
        # self-play forgets the others.
        known = 2 * config.value_limit if spec.alternating else 0.0
        search = planning.gumbel_search(config, model, max(config.value_range, known))
    else:
        search = planning.muzero_search(config, model)

    def think(planner: Planner, params: Params, observation: Any, key: Array, acting: Any) -> Plan:
        return search(planner, params, observation, action_mask(observation), key, acting)

    rebuild = lambda config: alphazero(spec, config, network)
    return assemble("alphazero", spec, config, network, search, think, rebuild)


def environment_model(spec: Spec) -> Model:
    """The environment as a model: the searches' `weights` are the agent's `Params`, their observations raw ones."""

    def root(planner: Planner, params: Params, observation: Any) -> Any:
        logits, value = evaluate(planner, params, observation)
        node = Node(observation[STATE], jnp.zeros(value.shape, bool))
        return planning.record("RootFnOutput")(prior_logits=logits, value=value, embedding=node)

    def recurrent(planner: Planner) -> Callable[..., Any]:
        return stepper(spec, planner.discount, lambda params, key, seen: evaluate(planner, params, seen))

    return Model(root, recurrent)


def evaluate(planner: Planner, params: Params, observation: Any) -> tuple[Array, Array]:
    """The network's policy logits [B, A], illegal actions excluded, and values [B] of raw observations."""
    seen = normalised(params.observation, observation)
    prediction = planner.network.apply(
        params.weights, lambda module, looked: module.predict(module.represent(looked)), features(seen)
    )
    return mask_logits(prediction.policy, action_mask(observation)), planner.value.mean(prediction.value)


def stepper(spec: Spec, discount: Any, judge: Callable[[Any, Array, Any], tuple[Array, Array]]) -> Callable[..., Any]:
    """A `recurrent_fn` that steps the true environment.

    Args:
      spec: with a model.
      discount: gamma; negative where two players take turns.
      judge: `(params, key, observation [L]) -> (prior logits [L, A], value [L])`.
    """

    def recurrent(params, key, action, node: Node):
        step_key, judge_key = jax.random.split(key)
        keys = jax.random.split(step_key, action.shape[0])
        step = lambda state, action, key: spec.model.step(spec.model.state_of({STATE: state}), action, key)[1]
        out = jax.vmap(step)(node.state, action, keys)
        over = node.over | out.terminated
        logits, value = judge(params, judge_key, out.observation)
        output = planning.record("RecurrentFnOutput")(
            # Beyond the end nothing is earned, whatever an environment says when it is stepped there.
            reward=jnp.where(node.over, 0.0, out.reward.astype(jnp.float32)),
            discount=jnp.where(over, 0.0, discount),
            prior_logits=logits,
            value=jnp.where(over, 0.0, value),
        )
        return output, Node(out.observation[STATE], over)

    return recurrent
