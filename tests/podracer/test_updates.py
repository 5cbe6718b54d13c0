"""One update of each algorithm against its loss as the paper writes it, on distrax and plain numpy targets."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from podracer import learning
from podracer.networks.functional import functional
from podracer.networks.heads import ActorCritic, QNetwork
from podracer.specs import Discrete
from tests.contracts.agents import NETWORKS, SPECS, B, Bench, T, disturbed, fast_jit, make
from tests.podracer.test_returns import GAMMA, Data, gae_sum, lambda_return, n_step, pieces, vtrace_target

distrax = pytest.importorskip("distrax")
pytestmark = pytest.mark.loose_rank

RATE = 0.1
KINDS = ("masked", "continuous", "multi-discrete")


def targets(timestep, values, log_rho, function) -> np.ndarray:
    """`function(piece, i)` [T, B] at real transitions, 0 at resets."""
    out, data = np.zeros((T, B)), Data(jax.tree.map(np.asarray, timestep), np.asarray(values), np.asarray(log_rho))
    for b in range(B):
        for piece in pieces(data, b):
            for i, t in enumerate(piece.at):
                out[t, b] = function(piece, i)
    return out


def setting(name, kind, **settings):
    """A trajectory of a policy that is not the learner's, what the learner does with it, and the learner's network."""
    spec = SPECS[kind]
    agent = make(name, spec, discount=GAMMA, learning_rate=RATE, **settings)
    it = Bench(agent, spec)
    state = it.init(jax.random.key(0))
    state = state._replace(params=state.params._replace(weights=jax.tree.map(lambda x: 1.5 * x, state.params.weights)))
    trajectory, _ = it.unroll(disturbed(state.params), 5)
    after, metrics = it.learn(state, trajectory, jax.random.key(0))
    module = QNetwork if name == "pqn" else functools.partial(ActorCritic, shared=False)
    network = functional(lambda rngs: module(spec, NETWORKS["mlp"], rngs=rngs))

    def outputs(weights):
        timestep = trajectory.timestep
        first = network.module.initial_state(B)
        run = lambda module, *args: module.unroll(*args)[0]
        return network.apply(weights, run, timestep.observation, timestep.first, first)

    return spec, state.params.weights, trajectory, outputs, after.params.weights, metrics


def log_prob_and_entropy(spec, numbers, action):
    """By distrax."""
    if isinstance(spec.action, Discrete):
        parts, actions = [distrax.Categorical(logits=numbers)], [action]
    elif hasattr(spec.action, "num_values"):
        split = jnp.split(numbers, np.cumsum(spec.action.num_values)[:-1], -1)
        parts, actions = [distrax.Categorical(logits=part) for part in split], list(jnp.moveaxis(action, -1, 0))
    else:
        mean, log_std = jnp.split(numbers, 2, -1)
        parts, actions = [distrax.MultivariateNormalDiag(mean, jnp.exp(log_std))], [action]
    return sum(p.log_prob(a) for p, a in zip(parts, actions, strict=True)), sum(p.entropy() for p in parts)


def check_descent(weights, after, loss):
    """Plain descent: what the weights moved by is the gradient times the rate, and it is not small."""
    gradient = jax.grad(loss)(weights)
    assert max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(gradient)) > 1e-2
    moved = jax.tree.map(lambda old, new: (old - new) / RATE, weights, after)
    jax.tree.map(lambda got, wanted: np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-5), moved, gradient)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["a2c", "impala"])
def test_a2c_and_impala_descend_the_policy_gradient_the_value_error_and_minus_the_entropy(name, kind):
    """With A2C's two-step returns, or V-trace with clips of its own; averages over real transitions."""
    own = {"n_step": 2} if name == "a2c" else {"vtrace_lambda": 0.8, "clip_rho": 1.4, "clip_pg_rho": 1.2}
    spec, weights, trajectory, outputs, after, metrics = setting(name, kind, entropy_cost=0.07, value_cost=0.3, **own)
    action, valid = trajectory.actor_output.action, trajectory.timestep.valid[1:]
    seen = outputs(weights)
    log_prob, _ = log_prob_and_entropy(spec, seen.policy[:-1], action)
    log_rho = log_prob - trajectory.actor_output.extras.agent.log_prob
    at = functools.partial(targets, trajectory.timestep, seen.value, log_rho)
    if name == "a2c":
        target = at(lambda piece, i: n_step(piece, i, 2))
        advantage = at(lambda piece, i: n_step(piece, i, 2) - piece.value[i])
    else:
        target = at(lambda piece, i: vtrace_target(piece, i, 0.8, 1.4))

        def policy_advantage(piece, i):
            following = piece.last
            if i + 1 < len(piece.at):
                following = 0.8 * vtrace_target(piece, i + 1, 0.8, 1.4) + 0.2 * piece.value[i + 1]
            return min(1.2, piece.rho[i]) * (piece.reward[i] + GAMMA * following - piece.value[i])

        advantage = at(policy_advantage)
        assert np.abs(np.asarray(log_rho)).max() > 0.5

    def loss(weights):
        seen = outputs(weights)
        log_prob, entropy = log_prob_and_entropy(spec, seen.policy[:-1], action)
        each = -advantage * log_prob + 0.3 * 0.5 * (target - seen.value[:-1]) ** 2 - 0.07 * entropy
        return jnp.sum(jnp.where(valid, each, 0.0)) / jnp.sum(valid)

    check_descent(weights, after, loss)
    assert metrics["loss"] == pytest.approx(float(loss(weights)), rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("value_clip", "normalize"), [(None, True), (0.2, False)])
def test_ppo_descends_the_clipped_surrogate(kind, value_clip, normalize):
    """With ratios far from 1, so that many are clipped; advantages by GAE from the values noted while acting."""
    spec, weights, trajectory, outputs, after, metrics = setting(
        "ppo",
        kind,
        epochs=1,
        value_clip=value_clip,
        normalize_advantages=normalize,
        clip=0.15,
        gae_lambda=0.8,
        entropy_cost=0.07,
        value_cost=0.3,
    )
    noted, action = trajectory.actor_output.extras.agent, trajectory.actor_output.action
    valid = np.asarray(trajectory.timestep.valid[1:])
    values = np.concatenate([noted.value, outputs(weights).value[-1:]])
    advantage = targets(trajectory.timestep, values, np.zeros((T, B)), lambda piece, i: gae_sum(piece, i, 0.8))
    target = advantage + values[:-1]
    if normalize:
        advantage = (advantage - advantage[valid].mean()) / np.sqrt(advantage[valid].var() + 1e-8)
    old = np.asarray(noted.value)

    def each(weights):
        seen = outputs(weights)
        log_prob, entropy = log_prob_and_entropy(spec, seen.policy[:-1], action)
        ratio = jnp.exp(log_prob - noted.log_prob)
        surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.85, 1.15) * advantage)
        value = seen.value[:-1]
        error = (value - target) ** 2
        if value_clip is not None:
            error = jnp.maximum(error, (old + jnp.clip(value - old, -value_clip, value_clip) - target) ** 2)
        return -surrogate + 0.3 * 0.5 * error - 0.07 * entropy, ratio

    def loss(weights):
        return jnp.sum(jnp.where(valid, each(weights)[0], 0.0)) / valid.sum()

    check_descent(weights, after, loss)
    ratio = np.asarray(each(weights)[1])[valid]
    clipped = (np.abs(ratio - 1) > 0.15).mean()
    assert clipped > 0.2
    assert metrics["clip_fraction"] == pytest.approx(clipped, abs=1e-5)
    assert metrics["ratio"] == pytest.approx(ratio.mean(), rel=1e-4)
    assert metrics["kl"] == pytest.approx((ratio - 1 - np.log(ratio)).mean(), rel=1e-3)
    assert metrics["loss"] == pytest.approx(float(loss(weights)), rel=1e-4)


def test_ppo_takes_one_step_of_adam_per_minibatch_of_shuffled_decisions():
    """Three updates of 3 epochs and 4 minibatches against the published loop: single decisions shuffled anew in each
    epoch, advantages standardised per minibatch over real transitions, optax's clipping and Adam leaf by leaf, and a
    rate that falls per update. The data and the orders are the same."""
    spec, epochs, minibatches, rate = SPECS["masked"], 3, 4, 5e-3
    settings = {"epochs": epochs, "minibatches": minibatches, "value_clip": 0.2, "gae_lambda": 0.8}
    settings |= {"optimizer": "adam", "learning_rate": rate, "max_grad_norm": 0.5, "anneal_steps": 10 * T * B}
    it = Bench(make("ppo", spec, discount=GAMMA, **settings), spec)
    network = functional(lambda rngs: ActorCritic(spec, NETWORKS["mlp"], shared=False, rngs=rngs))
    rule = optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.adam(lambda count: rate * (1 - count // (epochs * minibatches) / 10), eps=1e-5),
    )

    def outputs(weights, timestep):
        state, run = network.module.initial_state(B), lambda module, *args: module.unroll(*args)[0]
        return network.apply(weights, run, timestep.observation, timestep.first, state)

    @fast_jit
    def step(weights, opt_state, trajectory, advantage, target, order):
        def loss(weights):
            seen, noted = outputs(weights, trajectory.timestep), trajectory.actor_output.extras.agent
            log_prob, entropy = log_prob_and_entropy(spec, seen.policy[:-1], trajectory.actor_output.action)
            each = (seen.value[:-1], noted.value, log_prob - noted.log_prob, entropy, advantage, target)
            value, old, log_ratio, bonus, gain, wanted = (x.reshape(-1)[order] for x in each)
            valid = trajectory.timestep.valid[1:].reshape(-1)[order]
            mean = functools.partial(jnp.mean, where=valid)
            gain = (gain - mean(gain)) / (jnp.std(gain, where=valid) + 1e-8)
            ratio, near = jnp.exp(log_ratio), old + jnp.clip(value - old, -0.2, 0.2)
            surrogate = jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain)
            error = jnp.maximum((value - wanted) ** 2, (near - wanted) ** 2)
            return mean(-surrogate + 0.5 * 0.5 * error - 0.01 * bonus)

        updates, opt_state = rule.update(jax.grad(loss)(weights), opt_state)
        return optax.apply_updates(weights, updates), opt_state

    state = it.init(jax.random.key(0))
    weights, opt_state, before = state.params.weights, rule.init(state.params.weights), state.params.weights
    for update in range(3):
        trajectory, _ = it.unroll(disturbed(state.params), update)
        key = jax.random.key(update)
        values = np.concatenate(
            [trajectory.actor_output.extras.agent.value, outputs(weights, trajectory.timestep).value[-1:]]
        )
        zeros = np.zeros((T, B))
        advantage = targets(trajectory.timestep, values, zeros, lambda piece, i: gae_sum(piece, i, 0.8))
        target = advantage + values[:-1]
        for epoch_key in jax.random.split(key, epochs):
            for order in learning.permutation(epoch_key, T * B).reshape(minibatches, -1):
                weights, opt_state = step(weights, opt_state, trajectory, advantage, target, order)
        state, _ = it.learn(state, trajectory, key)
    jax.tree.map(
        lambda got, wanted: np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-5), state.params.weights, weights
    )
    moved = jax.tree.map(lambda old, new: float(np.abs(old - new).max()), before, weights)
    assert min(jax.tree.leaves(moved)) > rate


def test_pqn_descends_the_squared_error_to_its_lambda_returns():
    """Targets from the best value noted while acting, and the learner's own at the end of the unroll."""
    _, weights, trajectory, outputs, after, metrics = setting("pqn", "masked", epochs=1, q_lambda=0.6)
    action, valid = trajectory.actor_output.action, np.asarray(trajectory.timestep.valid[1:])
    best = np.concatenate([trajectory.actor_output.extras.agent, outputs(weights)[-1:].max(-1)])
    target = targets(trajectory.timestep, best, np.zeros((T, B)), lambda piece, i: lambda_return(piece, i, 0.6))

    def loss(weights):
        chosen = jnp.take_along_axis(outputs(weights)[:-1], action[..., None], -1)[..., 0]
        return 0.5 * jnp.sum(jnp.where(valid, (chosen - target) ** 2, 0.0)) / valid.sum()

    check_descent(weights, after, loss)
    assert metrics["loss"] == pytest.approx(float(loss(weights)), rel=1e-4)


@pytest.mark.parametrize(("updates", "share"), [(0, 0.8), (50, 0.5), (100, 0.2), (10**6, 0.2)])
def test_pqn_explores_among_the_legal_actions_by_its_schedule(updates, share):
    """The share of random actions falls from 0.8 to 0.2 over 100 updates; each legal action is as likely among them."""
    spec, rows = SPECS["masked"], 20_000
    it = Bench(make("pqn", spec, epsilon_start=0.8, epsilon_end=0.2, epsilon_updates=100), spec)
    params = it.init(jax.random.key(0)).params._replace(updates=jnp.asarray(updates, jnp.int32))
    trajectory, _ = it.unroll(params, 0, batch_size=16)
    one = jax.tree.map(lambda leaf: jnp.repeat(leaf[0, :1], rows, 0), trajectory.timestep)
    mask = jnp.asarray([True, False, True, True])
    one = one._replace(observation={**one.observation, "action_mask": jnp.tile(mask, (rows, 1))})
    actor = it.agent.initial_actor_state(rows)
    best = int(it.agent.greedy_step(params, actor, one, jax.random.key(0))[0].action[0])
    output, _ = it.agent.actor_step(params, actor, one, jax.random.key(1))
    counts = np.bincount(output.action, minlength=4) / rows
    wanted = np.where(np.asarray(mask), share / 3, 0.0)
    wanted[best] += 1 - share
    np.testing.assert_allclose(counts, wanted, atol=0.015)
    assert counts[1] == 0
