"""What holds for every agent, whatever its network, its actions and its observations."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import agents, specs
from podracer.errors import UserError
from tests.contracts.agents import (
    CASES,
    EPOCHS,
    REPLAYING,
    SPECS,
    B,
    Bench,
    Case,
    T,
    bench,
    config_class,
    disturbed,
    fast_jit,
    make,
)

AGENTS = ("a2c", "impala", "ppo", "pqn")
each_case = pytest.mark.parametrize("case", CASES, ids=str)
each_agent = pytest.mark.parametrize("name", AGENTS)


def close(one, other, tolerance=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), one, other)


def equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def differs(one, other):
    return any(np.any(a != b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def shapes(tree):
    return jax.tree.map(
        lambda leaf: (jnp.shape(leaf), jnp.asarray(leaf).dtype, getattr(leaf, "weak_type", False)), tree
    )


@each_case
def test_acting_gives_actions_of_the_spec_and_keeps_the_shape_of_its_state(case):
    """Sampled and greedy; every leaf of state and extras leads with B, so that architectures can shard and stack it."""
    it = bench(case)
    params, actor = it.init(jax.random.key(0)).params, it.agent.initial_actor_state(B)
    trajectory, after = it.unroll(params, 0)
    assert shapes(after) == shapes(actor)
    assert all(leaf.shape[0] == B for leaf in jax.tree.leaves(actor))
    assert all(leaf.shape[:2] == (T, B) for leaf in jax.tree.leaves(trajectory.actor_output))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(trajectory.actor_output))
    now = jax.tree.map(lambda leaf: leaf[0], trajectory.timestep)
    greedy, state = fast_jit(it.agent.greedy_step)(params, actor, now, jax.random.key(0))
    assert shapes(state) == shapes(actor)
    for action in (trajectory.actor_output.action, greedy.action[None]):
        if isinstance(it.spec.action, specs.Continuous):
            assert action.dtype == jnp.float32 and action.shape[2:] == (it.spec.action.size,)
        elif isinstance(it.spec.action, specs.MultiDiscrete):
            assert action.dtype == jnp.int32 and action.shape[2:] == (2,)
            assert np.all(np.asarray(action) >= 0) and np.all(np.asarray(action) < np.array(it.spec.action.num_values))
        else:
            assert action.dtype == jnp.int32 and action.shape[2:] == ()
            assert np.all((action >= 0) & (action < 4))
    again, _ = it.unroll(params, 0)
    equal(trajectory, again)
    assert differs(trajectory.actor_output.action, it.unroll(params, 1)[0].actor_output.action)


@each_case
def test_learning_keeps_the_shape_of_its_state_and_reports_finite_scalars(case):
    """The state after an update can be fed to the next one without compiling again; the weights have moved."""
    it = bench(case)
    state = it.init(jax.random.key(0))
    trajectory, _ = it.unroll(state.params, 0)
    after, metrics = it.learn(state, trajectory, jax.random.key(0))
    assert shapes(after) == shapes(state)
    assert differs(after.params.weights, state.params.weights)
    assert {"loss", "gradient_norm", "nonfinite_updates", "learning_rate"} <= set(metrics)
    for name, value in metrics.items():
        assert value.shape == () and np.isfinite(value), name
    assert metrics["nonfinite_updates"] == 0 and metrics["gradient_norm"] > 0


@each_case
def test_resets_do_not_influence_an_update(case):
    """Reward, discount, action and behaviour probability of a masked transition may be anything.

    The value that the actor gave the observation before it stays: a truncated episode is bootstrapped from it.
    """
    it = bench(case)
    state, actor = it.trained(2)
    trajectory, _ = it.unroll(state.params, 7, actor)
    timestep, output = trajectory.timestep, trajectory.actor_output
    masked = np.asarray(~timestep.valid)
    assert masked[1:].any(0).sum() > 1 and masked[1:].sum() > 4
    other = it.unroll(state.params, 8)[0].actor_output
    rng = np.random.default_rng(0)

    def swap(mine, theirs):
        mask = masked[1:].reshape(masked[1:].shape + (1,) * (mine.ndim - 2))
        return jnp.where(mask, theirs, mine)

    extras = output.extras
    noise = jnp.asarray(rng.normal(size=(T, B)) * 30, jnp.float32)
    if case.agent in REPLAYING:
        extras = extras._replace(policy=jax.tree.map(swap, extras.policy, _flipped(other.extras.policy)))
        extras = extras._replace(visit_entropy=swap(extras.visit_entropy, noise))
    elif case.agent != "pqn":  # PQN notes the value only
        extras = extras._replace(agent=extras.agent._replace(log_prob=swap(extras.agent.log_prob, noise)))
    changed = trajectory._replace(
        timestep=timestep._replace(
            reward=jnp.where(masked, jnp.asarray(rng.normal(size=masked.shape) * 1e6, jnp.float32), timestep.reward),
            discount=jnp.where(masked, 0.0, timestep.discount),
        ),
        actor_output=output._replace(action=jax.tree.map(swap, output.action, other.action), extras=extras),
    )
    assert differs(changed, trajectory)
    key = jax.random.key(1)
    (one, metrics), (two, changed_metrics) = it.learn(state, trajectory, key), it.learn(state, changed, key)
    equal(one, two)
    equal(metrics, changed_metrics)


def _flipped(policy):
    return jax.tree.map(lambda leaf: jnp.flip(leaf, -1), policy)


@each_case
def test_real_transitions_do_influence_an_update(case):
    """The counterpart, without which the test above could not fail."""
    it = bench(case)
    state, actor = it.trained(2)
    trajectory, _ = it.unroll(state.params, 7, actor)
    timestep = trajectory.timestep
    real = np.argwhere(np.asarray(timestep.valid[1:])) + np.array([1, 0])
    # One is enough, except where only a sample is learnt from.
    where = tuple((real if case.agent in REPLAYING else real[-1:]).T)
    changed = trajectory._replace(timestep=timestep._replace(reward=timestep.reward.at[where].add(3.0)))
    key = jax.random.key(1)
    assert differs(it.learn(state, trajectory, key)[0].params.weights, it.learn(state, changed, key)[0].params.weights)


@pytest.mark.parametrize("case", [case for case in CASES if case.agent not in REPLAYING], ids=str)
def test_eight_cores_learn_what_one_learns_from_the_same_batch(case):
    """Three updates of plain descent; the episode ends crowd on two of the cores.

    Agents with a replay sample other starts from eight memories than from one: see `tests/muzero/test_agent.py`.
    """
    it = bench(case)
    one = eight = it.init(jax.random.key(0))
    actor = None
    for update in range(3):
        trajectory, actor = it.unroll(one.params, update, actor)
        assert len(set(np.asarray(trajectory.timestep.valid[1:]).reshape(T, 8, -1).sum((0, 2)).tolist())) > 1
        key = jax.random.key(update)
        one, metrics = it.learn(one, trajectory, key)
        eight, metrics_of_eight = it.learn_on_eight(eight, trajectory, key)
        close(one, eight)
        close(metrics, metrics_of_eight)


@each_case
def test_a_batch_of_resets_alone_changes_no_weights(case):
    it = bench(case)
    state = it.init(jax.random.key(0))
    trajectory, _ = it.unroll(state.params, 0)
    nothing = jnp.zeros_like(trajectory.timestep.valid)
    trajectory = trajectory._replace(timestep=trajectory.timestep._replace(valid=nothing, first=~nothing))
    after, metrics = it.learn(state, trajectory, jax.random.key(0))
    close(after.params.weights, state.params.weights, 1e-6)
    assert all(np.isfinite(value) for value in metrics.values())


@each_case
def test_a_reward_that_is_not_a_number_costs_one_update_and_no_more(case):
    """Weights, optimizer and statistics stay finite, the steps are counted, and the next update learns."""
    it = bench(case)
    state, actor = it.trained(1)
    trajectory, actor = it.unroll(state.params, 7, actor)
    where = tuple(np.argwhere(np.asarray(trajectory.timestep.valid[1:]))[0] + np.array([1, 0]))
    timestep = trajectory.timestep._replace(reward=trajectory.timestep.reward.at[where].set(jnp.nan))
    after, metrics = it.learn(state, trajectory._replace(timestep=timestep), jax.random.key(0))
    assert metrics["nonfinite_updates"] >= 1
    equal(after.params.weights, state.params.weights)
    equal(after.opt_state, state.opt_state)
    trajectory, _ = it.unroll(after.params, 8, actor)
    later, metrics = it.learn(after, trajectory, jax.random.key(0))
    assert metrics["nonfinite_updates"] == 0 and differs(later.params.weights, after.params.weights)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(later))


@pytest.mark.parametrize("case", [case for case in CASES if case.spec in ("masked", "dict", "modelled")], ids=str)
def test_illegal_actions_are_never_chosen(case):
    """Sampled, greedy, and (PQN) entirely at random; every legal action comes up."""
    it = bench(case)
    state, actor = it.trained(2)
    seen = set()
    for seed in range(5):
        for params in (it.init(jax.random.key(seed)).params, state.params):
            trajectory, _ = it.unroll(params, seed, actor)
            mask = np.asarray(trajectory.timestep.observation["action_mask"][:-1])
            action = np.asarray(trajectory.actor_output.action)
            assert np.take_along_axis(mask, action[..., None], -1).all()
            seen |= set(action.ravel().tolist())
    assert seen == {0, 1, 2, 3}
    now = jax.tree.map(lambda leaf: leaf[0], trajectory.timestep)
    greedy, _ = fast_jit(it.agent.greedy_step)(state.params, actor, now, jax.random.key(0))
    assert np.take_along_axis(mask[0], np.asarray(greedy.action)[:, None], -1).all()


@pytest.mark.parametrize("case", [case for case in CASES if case.agent == "ppo"], ids=str)
def test_the_first_ratio_of_an_update_is_1(case):
    """With one epoch of one minibatch, PPO's ratios are those before its first step: acting and learning agree.

    The divergence is a sum of terms of one sign, so that it is 0 only if every single ratio is 1.
    """
    it = bench(case, epochs=1)
    state, actor = it.trained(4)
    trajectory, _ = it.unroll(state.params, 7, actor)
    _, metrics = it.learn(state, trajectory, jax.random.key(0))
    assert metrics["ratio"] == pytest.approx(1.0, abs=2e-6)
    assert abs(metrics["kl"]) < 1e-6 and metrics["clip_fraction"] == 0
    stale, _ = it.unroll(disturbed(state.params), 7, actor)
    assert it.learn(state, stale, jax.random.key(0))[1]["kl"] > 1e-4


@pytest.mark.parametrize("case", [case for case in CASES if case.agent == "impala"], ids=str)
def test_without_lag_impala_is_a2c(case):
    """V-trace corrects nothing where the acting policy learns: importance weight 1, and A2C's very update."""
    it = bench(case)
    state, actor = it.trained(4)
    trajectory, _ = it.unroll(state.params, 7, actor)
    after, metrics = it.learn(state, trajectory, jax.random.key(0))
    assert metrics["rho"] == pytest.approx(1.0, abs=2e-6)
    wanted, _ = bench(dataclasses.replace(case, agent="a2c")).learn(state, trajectory, jax.random.key(0))
    close(after, wanted)
    # With lag it is not.
    stale, _ = it.unroll(disturbed(state.params), 7, actor)
    after, metrics = it.learn(state, stale, jax.random.key(0))
    assert abs(metrics["rho"] - 1) > 1e-4
    wanted, _ = bench(dataclasses.replace(case, agent="a2c")).learn(state, stale, jax.random.key(0))
    assert differs(after.params.weights, wanted.params.weights)


@each_agent
def test_acting_and_learning_use_one_version_of_the_statistics(name):
    """The statistics change with each update, after it: values noted while acting are those of the learner."""
    it = bench(Case(name, "mlp", "discrete", True))
    state, actor = it.trained(3)
    assert state.params.observation.count == 3 * T * B
    trajectory, _ = it.unroll(state.params, 7, actor)
    after, _ = it.learn(state, trajectory, jax.random.key(0))
    seen = np.asarray(trajectory.timestep.observation[:-1], np.float64).reshape(-1, 3)
    old, new = state.params.observation, after.params.observation
    total = old.count + T * B
    np.testing.assert_allclose(new.mean, (old.mean * old.count + seen.sum(0)) / total, rtol=1e-4)
    assert new.count == total and after.params.updates == 4


@pytest.mark.parametrize("next_step", [True, False])
def test_rewards_are_measured_by_the_return_of_each_episode(next_step):
    """The running return starts anew with every episode, in both reset modes, and across unrolls; against a loop."""
    it = bench(Case("a2c", "mlp", "discrete", True))
    gamma, state, actor = it.agent.config.discount, it.init(jax.random.key(0)), None
    running, seen = np.zeros(B), []
    for update in range(3):
        trajectory, actor = it.unroll(state.params, update, actor, next_step=next_step)
        timestep = jax.tree.map(np.asarray, trajectory.timestep._replace(observation=None))
        for t in range(T):
            for b in range(B):
                if not timestep.valid[t, b]:
                    running[b] = 0
                    continue
                running[b] = gamma * running[b] + timestep.reward[t, b]
                seen.append(running[b])
                if timestep.first[t, b]:
                    running[b] = 0
        state, _ = it.learn(state, trajectory, jax.random.key(update))
    assert state.params.reward.count == len(seen)
    np.testing.assert_allclose(state.params.reward.mean, np.mean(seen), rtol=1e-4)
    np.testing.assert_allclose(state.params.reward.square, np.var(seen), rtol=1e-4)


@each_agent
def test_a_first_reward_after_many_zeros_is_not_blown_up(name):
    """Returns that never varied have no scale; dividing by their deviation of 0 would ruin the value in one update."""
    it = bench(Case(name, "mlp", "dict", True))
    state, actor = it.init(jax.random.key(0)), None
    for update in range(3):
        trajectory, actor = it.unroll(state.params, update, actor)
        timestep = trajectory.timestep
        reward = jnp.zeros_like(timestep.reward).at[3, B - 1].set(float(update == 2))
        output = trajectory.actor_output
        extras = output.extras._replace(discounted_return=jnp.zeros((T, B)))
        trajectory = trajectory._replace(
            timestep=timestep._replace(reward=reward), actor_output=output._replace(extras=extras)
        )
        before = state
        state, metrics = it.learn(state, trajectory, jax.random.key(update))
    assert metrics["loss"] < 100
    assert differs(before.params.weights, state.params.weights)


def float_fields(name):
    return [field.name for field in dataclasses.fields(config_class(name)) if isinstance(field.default, float)]


@each_agent
def test_a_sweep_over_every_float_is_the_single_runs(name):
    """All float settings traced and vmapped at once, against agents that were built with each run's numbers."""
    spec, extra = SPECS["discrete"], {"normalize_observations": True, "normalize_rewards": True, "optimizer": "adam"}
    if name == "ppo":
        extra["value_clip"] = 0.3
    base = make(name, spec, **extra)
    # Smaller numbers than the agent's own, each float's different from the others'.
    rng = np.random.default_rng(0)
    floats = {}
    for field in [*float_fields(name), *(["value_clip"] if name == "ppo" else [])]:
        value = getattr(base.config, field)
        low = value * 0.5 if value < 1e3 else 0.4
        floats[field] = np.array([low, low + (min(1.0, value) - low) * rng.random()], np.float32)
    floats["max_grad_norm"] = np.array([0.05, 0.5], np.float32)
    assert {"learning_rate", "discount", "optimizer_epsilon"} <= set(floats)

    it, actor = Bench(base, spec), None
    start, trajectories = it.init(jax.random.key(3)), []
    for seed in range(2):
        trajectory, actor = it.unroll(start.params, seed, actor)
        trajectories.append(trajectory)

    def updates(agent):
        state = start
        for trajectory in trajectories:
            state, metrics = agent.learner_step(state, trajectory, jax.random.key(0), None)
        now = jax.tree.map(lambda leaf: leaf[1], trajectories[0].timestep)
        return state, metrics, agent.actor_step(state.params, actor, now, jax.random.key(1))

    swept = fast_jit(jax.vmap(lambda each: updates(base.rebuild(dataclasses.replace(base.config, **each)))))(floats)
    singles = []
    for i in range(2):
        config = dataclasses.replace(base.config, **{field: float(values[i]) for field, values in floats.items()})
        singles.append(fast_jit(lambda agent=base.rebuild(config): updates(agent))())
        close(jax.tree.map(lambda leaf, i=i: leaf[i], swept), singles[-1], 1e-4)
    assert differs(singles[0][0].params.weights, singles[1][0].params.weights)


def numeric_fields(name):
    """Fields that hold a number, or None for no number."""
    return [
        field.name
        for field in dataclasses.fields(config_class(name))
        if isinstance(field.default, int | float | None) and not isinstance(field.default, bool)
    ]


FIELDS = [(name, field) for name in AGENTS for field in numeric_fields(name)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1, -0.5, np.float32("nan"), np.float32(-1)], ids=str)
@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_a_setting_that_is_no_usable_number_is_refused_by_name(name, field, bad):
    with pytest.raises(UserError, match=rf"^{field} is "):
        config_class(name)(**{field: bad})


@pytest.mark.parametrize(("name", "field"), [(n, f) for n, f in FIELDS if f in ("epochs", "minibatches", "n_step")])
def test_a_count_that_is_not_whole_is_refused_by_name(name, field):
    with pytest.raises(UserError, match=rf"^{field} is 1.5"):
        config_class(name)(**{field: 1.5})


@each_agent
def test_an_unknown_optimizer_is_refused_by_name(name):
    with pytest.raises(UserError, match=r"optimizer.*adma.*adam"):
        make(name, SPECS["discrete"], optimizer="adma")


def test_defaults_are_usable_and_settings_may_be_whole_numbers():
    """`discount=1` is as good as `discount=1.0`, in every setting that allows it."""
    for name in AGENTS:
        getattr(agents, name)(SPECS["discrete"])
        whole = {field: 1 for field in float_fields(name)}
        it, floats = (
            Bench(
                make(name, SPECS["discrete"], **{field: kind(one) for field, one in whole.items()}), SPECS["discrete"]
            )
            for kind in (int, float)
        )
        state = it.init(jax.random.key(0))
        trajectory, _ = it.unroll(state.params, 0)
        equal(it.learn(state, trajectory, jax.random.key(0)), floats.learn(state, trajectory, jax.random.key(0)))


@pytest.mark.parametrize("kind", ["continuous", "multi-discrete"])
def test_pqn_refuses_actions_that_are_not_discrete(kind):
    with pytest.raises(UserError, match=f"pqn cannot drive {kind}.*expected Discrete.*Choose ppo"):
        agents.pqn(SPECS[kind])


@pytest.mark.parametrize("network", ["mlp", "lstm"])
@pytest.mark.parametrize("name", ["ppo", "pqn"])
def test_minibatches_that_do_not_divide_the_batch_are_refused_by_name(name, network):
    """Recurrent networks shuffle environments, others single steps."""
    it = Bench(make(name, SPECS["discrete"], network, minibatches=7), SPECS["discrete"])
    state = it.init(jax.random.key(0))
    trajectory, _ = it.unroll(state.params, 0)
    what = f"environments per core = {B}" if network == "lstm" else f"batch x unroll_length = {B * T}"
    with pytest.raises(UserError, match=f"{what}.*minibatches = 7"):
        it.learn(state, trajectory, jax.random.key(0))


@each_agent
def test_the_learning_rate_falls_with_the_decisions_of_all_cores(name):
    """Two updates' worth of decisions: full rate, half, none; on eight cores the same global batch."""
    it = Bench(make(name, SPECS["discrete"], anneal_steps=2 * T * B), SPECS["discrete"])
    state = it.init(jax.random.key(0))
    trajectory, _ = it.unroll(state.params, 0)
    for rate in (0.05, 0.025, 0.0, 0.0):
        _, on_eight = it.learn_on_eight(state, trajectory, jax.random.key(0))
        before = state
        state, metrics = it.learn(state, trajectory, jax.random.key(0))
        assert metrics["learning_rate"] == pytest.approx(rate) and on_eight["learning_rate"] == pytest.approx(rate)
        assert differs(before.params.weights, state.params.weights) == (rate > 0)


def test_epochs_and_minibatches_are_steps():
    """PPO and PQN take epochs x minibatches steps per update, in an order that the key decides."""
    for name in ("ppo", "pqn"):
        several = Bench(make(name, SPECS["discrete"], epochs=2, minibatches=4, optimizer="adam"), SPECS["discrete"])
        state = several.init(jax.random.key(0))
        trajectory, _ = several.unroll(state.params, 0)
        one, _ = several.learn(state, trajectory, jax.random.key(0))
        counts = [leaf for leaf in jax.tree.leaves(one.opt_state) if leaf.dtype == jnp.int32]
        assert [int(count) for count in counts] == [8]
        other, _ = several.learn(state, trajectory, jax.random.key(1))
        assert differs(one.params.weights, other.params.weights)
    assert EPOCHS["minibatches"] == 1
