"""The agents as a whole: acting, the limiter and the memory in `learner_step`, targets, replicas, names."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import muzero
from muzero import planning, replay
from podracer import mesh, specs
from podracer.agents.common import normalised
from podracer.errors import UserError
from podracer.types import LearnerState
from tests.contracts.agents import SPECS, B, Bench, T, disturbed, fast_jit, timesteps

pytestmark = pytest.mark.loose_rank  # mctx broadcasts arrays of different rank

SMALL = {
    "num_simulations": 4,
    "unroll_steps": 2,
    "td_steps": 2,
    "sequence_length": T,
    "replay_steps": 12 * T * B,
    "min_replay": T * B,
    "batch_size": 32,
    "replay_ratio": 1.0,
    "value_bins": 11,
    "reward_bins": 11,
    "value_limit": 20.0,
    "reward_limit": 5.0,
}
NETWORK = muzero.network(8, 1, 8)
MAKERS = {
    "muzero": (muzero.muzero, muzero.Config),
    "gumbel-muzero": (muzero.gumbel_muzero, muzero.GumbelConfig),
}
each_agent = pytest.mark.parametrize("name", list(MAKERS))


@functools.cache
def bench(name="gumbel-muzero", kind="discrete", **settings):
    maker, config = MAKERS[name]
    return Bench(maker(SPECS[kind], config(**{**SMALL, **settings}), NETWORK), SPECS[kind])


def _swapped(tree):
    """Time and batch change places."""
    return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), tree)


def differs(one, other):
    return any(np.any(a != b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


@each_agent
@pytest.mark.parametrize("kind", ["discrete", "dict"])
def test_acting_notes_what_the_search_found(name, kind):
    it = bench(name, kind)
    params = it.init(jax.random.key(0)).params
    trajectory, _ = it.unroll(params, 0)
    notes = trajectory.actor_output.extras
    np.testing.assert_allclose(notes.policy.sum(-1), 1, rtol=1e-5)
    assert np.all(notes.visit_entropy >= 0) and np.all(notes.visit_entropy <= np.log(4) + 1e-5)
    mask = specs.action_mask(trajectory.timestep.observation)
    if mask is not None:
        assert np.all(np.asarray(notes.policy)[~np.asarray(mask[:-1])] == 0)
        assert np.take_along_axis(
            np.asarray(mask[:-1]), np.asarray(trajectory.actor_output.action)[..., None], -1
        ).all()
    now = jax.tree.map(lambda leaf: leaf[0], trajectory.timestep)
    greedy = fast_jit(it.agent.greedy_step)
    first, second = (greedy(params, (), now, jax.random.key(key))[0].action for key in (0, 1))
    np.testing.assert_array_equal(first, second)  # no noise


def test_a_model_that_says_what_is_no_number_is_reported():
    """Its numbers count as 0 in the search, so that nothing else would show it."""
    it = bench()
    state = it.init(jax.random.key(0))
    trajectory, _ = it.unroll(state.params, 0)
    assert not np.any(trajectory.actor_output.extras.nonfinite)
    weights = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), state.params.weights)
    broken, _ = it.unroll(state.params._replace(weights=weights), 0)
    assert np.all(broken.actor_output.extras.nonfinite) and np.all(np.isfinite(broken.actor_output.extras.policy))
    shares = [it.learn(state, each, jax.random.key(0))[1]["nonfinite_searches"] for each in (trajectory, broken)]
    assert shares == [0.0, 1.0] and set(it.agent.alarms) <= set(it.learn(state, broken, jax.random.key(0))[1])


@pytest.mark.parametrize(
    ("name", "kind"), [("muzero", "discrete"), ("gumbel-muzero", "discrete"), ("gumbel-muzero", "masked")]
)
def test_both_searches_plan_alike(name, kind):
    """`search` says who searches: the same plan, from ours and from DeepMind's."""
    fast, theirs = bench(name, kind), bench(name, kind, search="mctx")
    params = disturbed(fast.init(jax.random.key(0)).params)
    for seed in range(3):
        one, other = (it.unroll(params, seed)[0].actor_output for it in (fast, theirs))
        agree = np.asarray(one.action == other.action)
        assert agree.mean() > 0.95
        close = np.isclose(one.extras.value, other.extras.value, rtol=1e-3, atol=1e-4)
        assert close.mean() > 0.95


@pytest.mark.parametrize(("value_range", "stretched"), [(1e-8, 1.0), (0.01, 1.0), (1.0, 0.01)])
@pytest.mark.parametrize("search", ["fast", "mctx"])
def test_small_differences_of_value_are_stretched_no_further_than_to_the_range(search, value_range, stretched):
    """Two actions, worth 0 and 0.01, each looked at once; `stretched` is what the 0.01 counts for."""
    config = muzero.GumbelConfig(num_simulations=2, search=search, value_scale=0.05, value_range=value_range)

    def root(planner, weights, observation):
        zeros = jnp.zeros((1,))
        return planning.record("RootFnOutput")(prior_logits=jnp.zeros((1, 2)), value=zeros, embedding=zeros)

    def recurrent(weights, key, action, latent):
        reward, zeros = 0.01 * action.astype(jnp.float32), jnp.zeros((1,))
        made = planning.record("RecurrentFnOutput")(
            reward=reward, discount=zeros, prior_logits=jnp.zeros((1, 2)), value=zeros
        )
        return made, latent

    plan = planning.gumbel_search(config, planning.Model(root, lambda planner: recurrent))(
        None, None, None, None, jax.random.key(0), None
    )
    weight = np.exp(0.05 * (50 + 1) * stretched)  # 50 and the most visits
    np.testing.assert_allclose(plan.policy[0], np.array([1, weight]) / (1 + weight), rtol=1e-3)


def test_the_temperature_falls_in_three_stages():
    config = muzero.Config(temperature_start=1.0, temperature_end=0.25, temperature_updates=100)
    found = [float(planning.temperature(config, jnp.int32(updates))) for updates in (0, 49, 50, 74, 75, 1000)]
    np.testing.assert_allclose(found, [1, 1, 0.5, 0.5, 0.25, 0.25])


@pytest.mark.parametrize("ratio", [0.5, 1.0, 0.1])
def test_gradient_steps_follow_the_decisions(ratio):
    """Nothing before `min_replay`; after it, exactly the ratio, carried from one trajectory to the next."""
    it = bench(replay_ratio=ratio, min_replay=3 * T * B)
    state, actor, total = it.init(jax.random.key(0)), None, 0
    for update in range(12):
        trajectory, actor = it.unroll(state.params, update, actor)
        before = state
        state, metrics = it.learn(state, trajectory, jax.random.key(update))
        wanted = int(np.floor(max(update - 1, 0) * ratio * T * B / 32 + 1e-6))
        assert int(metrics["gradient_steps"]) == wanted - total
        assert metrics["replay_ratio"] == pytest.approx((wanted - total) * 32 / (T * B))
        assert int(state.slow.gradient_steps) == wanted
        assert differs(before.params.weights, state.params.weights) == (wanted > total)
        assert metrics["replay_fill"] == pytest.approx(min((update + 1) / 12, 1))
        if wanted == total:  # the numbers of the last gradient steps are told again, not zeros
            assert metrics["loss"] == before.slow.metrics["loss"]
        total = wanted
    assert state.params.updates == 12


@pytest.mark.parametrize(
    "settings",
    [
        {"sampling": "prioritised", "value_target": "network", "reanalysed": 8, "self_consistency": True},
        {"reanalysed": 32, "target_update": "copy", "target_period": 3, "td_steps": 50, "td_lambda": 0.9},
    ],
    ids=["all", "reanalysed"],
)
def test_replicas_stay_equal_and_memories_differ(settings):
    """Eight cores, each with a memory of its own: after three updates the replicated parts are the same bits."""
    it = bench(**settings)
    agent = it.agent
    parts = LearnerState(mesh.SHARDED, mesh.SHARDED, mesh.SHARDED, mesh.SHARDED)

    def learn(state, trajectory, key):
        state = jax.tree.map(lambda leaf: leaf[0], state)
        key = jax.random.fold_in(key, mesh.index(mesh.CORE))
        state, metrics = agent.learner_step(state, _swapped(trajectory), key, mesh.CORE)
        return jax.tree.map(lambda leaf: leaf[None], state), mesh.mean(metrics, mesh.CORE)

    over = mesh.over_cores(learn, mesh.make(8), (parts, mesh.SHARDED, mesh.REPLICATED), (parts, mesh.REPLICATED))
    over = fast_jit(over)
    single = it.init(jax.random.key(0))
    state = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[None], (8, *leaf.shape)), single)
    for update in range(3):
        trajectory, _ = it.unroll(single.params, update)
        state, metrics = over(state, _swapped(trajectory), jax.random.key(update))
        assert metrics["gradient_steps"] > 0 and all(np.isfinite(value) for value in metrics.values())
    for leaf in jax.tree.leaves((state.params, state.opt_state, state.slow)):
        np.testing.assert_array_equal(leaf, np.broadcast_to(np.asarray(leaf)[:1], leaf.shape))
    assert differs(state.params.weights, jax.tree.map(lambda leaf: leaf[None], single.params.weights))
    values = np.asarray(state.memory.sequences.value)
    assert len({values[core].tobytes() for core in range(8)}) == 8


def test_eight_cores_learn_what_one_learns_from_the_same_starts(monkeypatch):
    """Each core holds one start, so that it can but sample that one; one core samples all of them."""
    settings = {
        "sequence_length": 3,
        "unroll_steps": 3,
        "min_replay": 1,
        "batch_size": 8,
        "optimizer": "sgd",
        "learning_rate": 0.05,
    }
    settings |= {"max_grad_norm": 1e6, "sampling": "prioritised"}
    it, whole = bench(replay_steps=3, **settings), bench(replay_steps=24, **settings)
    state = it.init(jax.random.key(0))
    trajectory, _ = it.unroll(state.params, 1, length=3, batch_size=8)
    # Without ends: after one, the model is fed random actions, and each core draws its own.
    flags = trajectory.timestep
    ones, zeros = jnp.ones_like(flags.valid), jnp.zeros_like(flags.first)
    flags = flags._replace(discount=jnp.ones_like(flags.discount), valid=ones, first=zeros)
    trajectory, key = trajectory._replace(timestep=flags), jax.random.key(0)
    memory = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[None], (8, *leaf.shape)), state.memory)

    def learn(state, trajectory, key):
        state = state._replace(memory=jax.tree.map(lambda leaf: leaf[0], state.memory))
        state, metrics = it.agent.learner_step(state, _swapped(trajectory), key, mesh.CORE)
        return state.params, mesh.mean(metrics, mesh.CORE)

    parts = LearnerState(mesh.REPLICATED, mesh.REPLICATED, mesh.REPLICATED, mesh.SHARDED)
    over = mesh.over_cores(learn, mesh.make(8), (parts, mesh.SHARDED, mesh.REPLICATED), mesh.REPLICATED)
    eight, metrics = fast_jit(over)(state._replace(memory=memory), _swapped(trajectory), key)
    assert metrics["gradient_steps"] == 3

    def in_order(self, memory, key, size):
        return replay.Sample(jnp.arange(size), jnp.zeros(size, jnp.int32), jnp.ones(size))

    monkeypatch.setattr(replay.Replay, "sample", in_order)
    learn_alone = fast_jit(lambda *args: whole.agent.learner_step(*args, None))
    one, metrics_of_one = learn_alone(whole.init(jax.random.key(0)), trajectory, key)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), one.params, eight)
    for metric in ("loss", "policy_loss", "value", "gradient_norm"):
        assert float(metrics[metric]) == pytest.approx(float(metrics_of_one[metric]), rel=1e-4), metric


def test_the_target_network_follows():
    """A moving average, or copies now and then, and none where nothing asks for it."""
    assert bench().init(jax.random.key(0)).slow.target == ()
    for settings in ({"target_update": "ema", "target_decay": 0.9}, {"target_update": "copy", "target_period": 2}):
        it = bench(value_target="network", **settings)
        state, actor = it.init(jax.random.key(0)), None
        old = state.slow.target
        for update in range(2):
            trajectory, actor = it.unroll(state.params, update, actor)
            state, _ = it.learn(state, trajectory, jax.random.key(update))
            assert differs(old, state.slow.target)
            copied = settings["target_update"] == "copy" and state.slow.gradient_steps % 2 == 0
            assert differs(state.params.weights, state.slow.target) != copied
            old = state.slow.target


def test_reanalysed_targets_replace_what_was_stored():
    """With every start reanalysed, what the actor noted has no influence; with none it has."""
    for reanalysed, influence in ((32, False), (0, True)):
        it = bench(reanalysed=reanalysed)
        state = it.init(jax.random.key(0))
        trajectory, _ = it.unroll(state.params, 0)
        notes = trajectory.actor_output.extras
        other = notes._replace(policy=jnp.flip(notes.policy, -1), value=notes.value + 3)
        changed = trajectory._replace(actor_output=trajectory.actor_output._replace(extras=other))
        key = jax.random.key(1)
        one, two = (it.learn(state, each, key)[0].params.weights for each in (trajectory, changed))
        assert differs(one, two) == influence


def test_network_values_replace_the_stored_ones():
    it = bench(value_target="network")
    state = it.init(jax.random.key(0))
    trajectory, _ = it.unroll(state.params, 0)
    notes = trajectory.actor_output.extras
    changed = trajectory._replace(
        actor_output=trajectory.actor_output._replace(extras=notes._replace(value=notes.value + 3))
    )
    one, two = (it.learn(state, each, jax.random.key(1))[0].params.weights for each in (trajectory, changed))
    assert not differs(one, two)


def test_priorities_follow_the_errors():
    it = bench(sampling="prioritised")
    state = it.init(jax.random.key(0))
    trajectory, _ = it.unroll(state.params, 0)
    after, metrics = it.learn(state, trajectory, jax.random.key(0))
    filled = np.asarray(after.memory.priority)[:B]
    assert len(np.unique(filled)) > 10
    assert metrics["priority"] == pytest.approx(filled.mean(), rel=1e-5)
    # Final observations of truncated episodes hold nothing to learn.
    timestep = after.memory.sequences.timestep
    dead = ~np.asarray(timestep.valid)[:B, 1:] & ~np.asarray((timestep.discount == 0) & timestep.valid)[:B, :-1]
    np.testing.assert_array_equal(filled == 0, dead[:, : filled.shape[1]])


def test_observations_are_normalised_by_one_version_of_the_statistics():
    it = bench(normalize_observations=True)
    state, actor = it.trained(2)
    assert state.params.observation.count == 2 * T * B
    trajectory, _ = it.unroll(state.params, 7, actor)
    after, _ = it.learn(state, trajectory, jax.random.key(0))
    assert after.params.observation.count == 3 * T * B
    seen = trajectory.timestep.observation
    np.testing.assert_array_equal(after.memory.sequences.observation[2 * B : 3 * B], jnp.swapaxes(seen, 0, 1))
    assert normalised((), seen) is seen


def test_taking_turns_makes_the_discount_negative():
    """`Spec.alternating` reaches the search and the targets."""
    spec = dataclasses.replace(SPECS["discrete"], alternating=True)
    one = bench()
    two = Bench(muzero.gumbel_muzero(spec, muzero.GumbelConfig(**SMALL), NETWORK), spec)
    params = disturbed(one.init(jax.random.key(0)).params)
    trajectory, _ = one.unroll(params, 0)
    assert differs(trajectory.actor_output.extras.value, two.unroll(params, 0)[0].actor_output.extras.value)
    states = [it.learn(it.init(jax.random.key(0)), trajectory, jax.random.key(0))[0] for it in (one, two)]
    assert differs(states[0].params.weights, states[1].params.weights)


def test_what_cannot_be_is_refused_in_one_line():
    make = lambda **settings: muzero.gumbel_muzero(
        SPECS["discrete"], muzero.GumbelConfig(**{**SMALL, **settings}), NETWORK
    )
    for kind in ("continuous", "multi-discrete"):
        with pytest.raises(UserError, match=f"gumbel-muzero cannot drive {kind}.*expected Discrete.*Choose ppo"):
            muzero.gumbel_muzero(SPECS[kind])
    with pytest.raises(UserError, match=r"sequence_length is 1 and unroll_steps 2.*Raise sequence_length"):
        make(sequence_length=1)
    with pytest.raises(UserError, match=r"value_bins is 10; expected an odd number"):
        make(value_bins=10)
    with pytest.raises(UserError, match=r"unknown value_target 'rooot'.*Did you mean 'root'"):
        make(value_target="rooot")
    with pytest.raises(UserError, match=r"reanalysed is 33; expected .* <= 32"):
        make(reanalysed=33)
    with pytest.raises(UserError, match=r"replay_steps is 3; expected at least one sequence"):
        make(replay_steps=3)
    it = Bench(make(min_replay=10**6), SPECS["discrete"])
    trajectory, _ = it.unroll(it.init(jax.random.key(0)).params, 0)
    with pytest.raises(UserError, match=r"min_replay is 1,000,000, but the memories of 1 learner core hold 960"):
        it.learn(it.init(jax.random.key(0)), trajectory, jax.random.key(0))
    with pytest.raises(UserError, match=r"5 decisions .*sequence_length = 4 does not divide"):
        other = Bench(make(sequence_length=4), SPECS["discrete"])
        other.learn(other.init(jax.random.key(0)), trajectory, jax.random.key(0))
    with pytest.raises(UserError, match=r"replay_steps is 1e\+13; expected a finite number <= 2.14748e\+09"):
        make(replay_steps=10**13)


def test_the_size_of_the_memory_is_that_of_its_arrays():
    it = bench()
    memory = it.init(jax.random.key(0)).memory
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(memory))
    assert it.agent.replay == (960, num_bytes)


@each_agent
def test_the_names_are_known_and_make_the_same_agent_again(name):
    """What `config.json` keeps builds the agent."""
    import json

    from podracer import config, envs

    env = envs.Catch()
    agent = MAKERS[name][0](env.spec, MAKERS[name][1](num_simulations=3), muzero.network(16))
    recipe = config.describe(agent, env)
    assert recipe is not None and recipe.agent == name and recipe.network == "muzero"
    again, _ = config.build(config.Recipe(**json.loads(json.dumps(dataclasses.asdict(recipe)))))
    assert (again.name, again.config, again.network) == (name, agent.config, agent.network)


def test_terminal_rewards_are_learnt_where_the_episode_ends():
    """A chain that always ends after its first decision with reward 2: value 2 before the end, 0 on the final state."""
    it = bench(learning_rate=0.02, batch_size=80, replay_ratio=40.0)
    timestep = timesteps(it.spec, 0)
    phase = (jnp.arange(T + 1)[:, None] + jnp.zeros((1, B), int)) % 2  # 0: first, 1: final
    observation = jnp.stack([phase, 1 - phase, 0 * phase], -1).astype(jnp.float32)
    final = phase == 1
    timestep = timestep._replace(
        observation=observation,
        reward=jnp.where(final, 2.0, 0.0),
        discount=jnp.where(final, 0.0, 1.0),
        first=~final,
        valid=final,
    )
    state = it.init(jax.random.key(0))
    trajectory, _ = it.unroll(state.params, 0)
    trajectory = trajectory._replace(timestep=timestep)
    for update in range(4):
        state, metrics = it.learn(state, trajectory, jax.random.key(update))
    now = jax.tree.map(lambda leaf: leaf[:2, 0], timestep)
    root = planning.root_of(_planner(it.agent), state.params.weights, now.observation)
    np.testing.assert_allclose(root.value, [2.0, 0.0], atol=0.2)
    assert metrics["gradient_steps"] == 40


def _planner(agent):
    from muzero.model import Heads
    from muzero.support import Support
    from podracer.networks.functional import functional
    from podracer.networks.policies import policy

    heads = Heads(11, 11)
    network = functional(lambda rngs: NETWORK(SPECS["discrete"], heads, rngs))
    actions = policy(SPECS["discrete"].action)
    return planning.Planner(network, Support(20.0, 11), Support(5.0, 11), agent.config.discount, actions)
