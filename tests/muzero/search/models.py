"""Random models for tests of the search: a small network, and a decision process as a table."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mctx
import numpy as np

from podracer.networks.convolution import convolve


class Table(NamedTuple):
    """A deterministic decision process with a prior and a (wrong) value for each of S states."""

    following: Any  # [S, A] int32
    reward: Any  # [S, A]
    discount: Any  # [S, A]
    logits: Any  # [S, A]
    value: Any  # [S]


def table(seed: int, states: int, actions: int, discounts: tuple[float, ...] = (0.97,)) -> Table:
    """A random one; every transition has one of the `discounts`."""
    rng = np.random.default_rng(seed)
    return Table(
        rng.integers(0, states, (states, actions)).astype(np.int32),
        rng.normal(size=(states, actions)).astype(np.float32),
        rng.choice(discounts, (states, actions)).astype(np.float32),
        rng.normal(size=(states, actions)).astype(np.float32),
        rng.normal(size=states).astype(np.float32),
    )


def table_root(model: Table, states: Any) -> mctx.RootFnOutput:
    """The embedding has two leaves of different dtypes, the state and what was collected on the way."""
    states = jnp.asarray(states)
    embedding = {"state": states, "sum": jnp.zeros((*states.shape, 2))}
    return mctx.RootFnOutput(
        prior_logits=jnp.asarray(model.logits)[states], value=jnp.asarray(model.value)[states], embedding=embedding
    )


def table_step(model: Table, key: Any, action: Any, embedding: Any) -> Any:
    """The recurrent function of a table."""
    del key
    state = embedding["state"]
    reward, after = model.reward[state, action], model.following[state, action]
    output = mctx.RecurrentFnOutput(
        reward=reward,
        discount=model.discount[state, action],
        prior_logits=model.logits[after],
        value=model.value[after],
    )
    return output, {"state": after, "sum": embedding["sum"] + reward[:, None]}


HIDDEN = 8


def network(seed: int, actions: int, hidden: int = HIDDEN) -> dict[str, Any]:
    """Weights of a network that plays the model."""
    rng = np.random.default_rng(seed)

    def matrix(*shape):
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)

    return {
        "in": matrix(hidden + actions, hidden),
        "mid": matrix(hidden, hidden),
        "reward": matrix(hidden),
        "value": matrix(hidden),
        "logits": matrix(hidden, actions) * 2,
        "discount": matrix(hidden),
    }


def network_root(weights: Any, seed: int, batch: int) -> mctx.RootFnOutput:
    hidden = weights["mid"].shape[0]
    state = jnp.tanh(jnp.asarray(np.random.default_rng(seed).normal(size=(batch, hidden)), jnp.float32))
    return mctx.RootFnOutput(prior_logits=state @ weights["logits"], value=state @ weights["value"], embedding=state)


def network_step(weights: Any, key: Any, action: Any, embedding: Any) -> Any:
    """The recurrent function of a network; discounts lie between -1 and 1."""
    del key
    inputs = jnp.concatenate([embedding, jax.nn.one_hot(action, weights["logits"].shape[1])], axis=1)
    state = jnp.tanh(jnp.tanh(inputs @ weights["in"]) @ weights["mid"])
    output = mctx.RecurrentFnOutput(
        reward=state @ weights["reward"],
        discount=jnp.tanh(3 * state @ weights["discount"]),
        prior_logits=state @ weights["logits"],
        value=state @ weights["value"],
    )
    return output, state


def convolutional(seed: int, num_actions: int, channels: int = 64) -> Any:
    """A residual block on embeddings [L, 6, 6, channels] that know the action by a plane of its own, and heads."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: (rng.normal(size=shape) / np.sqrt(np.prod(shape[:-1]))).astype(np.float32)
    heads = {"reward": draw(channels), "discount": draw(channels), "value": draw(channels)}
    kernels = {"in": draw(3, 3, channels + 1, channels), "mid": draw(3, 3, channels, channels)}
    return {**kernels, **heads, "logits": draw(channels, num_actions)}


def convolutional_root(weights: Any, seed: int, batch: int) -> Any:
    """Roots with random embeddings."""
    shape = (batch, 6, 6, weights["mid"].shape[-1])
    embedding = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    output = _heads(weights, jnp.asarray(embedding))
    return mctx.RootFnOutput(prior_logits=output.prior_logits, value=output.value, embedding=jnp.asarray(embedding))


def convolutional_step(weights: Any, key: Any, action: Any, embedding: Any) -> Any:
    """The recurrent function of `convolutional`."""
    del key
    plane = (action / weights["logits"].shape[1])[:, None, None, None] * jnp.ones((*embedding.shape[:3], 1))
    hidden = jax.nn.relu(convolve(jnp.concatenate([embedding, plane], axis=3), weights["in"], 1, "SAME"))
    state = jnp.tanh(embedding + convolve(hidden, weights["mid"], 1, "SAME"))
    return _heads(weights, state), state


def _heads(weights: Any, state: Any) -> Any:
    pooled = jnp.mean(state, axis=(1, 2))
    return mctx.RecurrentFnOutput(
        reward=pooled @ weights["reward"],
        discount=jnp.tanh(3 * pooled @ weights["discount"]),
        prior_logits=8 * pooled @ weights["logits"],
        value=pooled @ weights["value"],
    )


def decision_step(weights: Any, key: Any, action: Any, embedding: Any) -> Any:
    """From a state [L, H] to an afterstate, a pair [L, H], [L]."""
    output, state = network_step(weights, key, action, embedding)
    chance = mctx.DecisionRecurrentFnOutput(
        chance_logits=state @ weights["outcomes"], afterstate_value=state @ weights["mid"][0]
    )
    return chance, (state, output.reward)


def chance_step(weights: Any, key: Any, outcome: Any, afterstate: Any) -> Any:
    """From an afterstate to a state."""
    del key
    state, reward = afterstate
    state = jnp.tanh(state @ weights["mid"] + jax.nn.one_hot(outcome, weights["outcomes"].shape[1]) @ weights["chance"])
    output = mctx.ChanceRecurrentFnOutput(
        action_logits=state @ weights["logits"],
        value=state @ weights["value"],
        reward=reward,
        discount=jnp.tanh(3 * state @ weights["discount"]),
    )
    return output, state


def two_plies(seed: int, actions: int, outcomes: int) -> dict[str, Any]:
    """Weights for `decision_step` and `chance_step`."""
    rng = np.random.default_rng(seed)
    more = {"outcomes": rng.normal(size=(HIDDEN, outcomes)), "chance": rng.normal(size=(outcomes, HIDDEN))}
    return network(seed, actions) | jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), more)
