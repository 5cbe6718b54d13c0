"""The Anakin loop: reproducible to the bit, the same on any number of cores, exact in what it counts."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anakin.calls import _introduce
from anakin.loop import Anakin
from anakin.members import Members
from anakin.run import Run
from anakin.settings import Settings
from podracer import agents, envs, mesh, networks, replays
from podracer.agents.a2c import Config
from podracer.errors import UserError
from podracer.types import ActorOutput, Agent, LearnerState, ReplaySize, TimeStep, Trajectory
from tests.envs.scripted import Scripted

T, PER_CORE, CORES = 4, 2, 8
BATCH = PER_CORE * CORES
ENV = Scripted()


def equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, numbers(one), numbers(other))


def close(one, other, tolerance=1e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), numbers(one), numbers(other)
    )


def numbers(tree):
    """The tree in numpy, PRNG keys as the numbers they are."""
    is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.tree.map(lambda leaf: np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf), tree)


def differs(one, other):
    pairs = zip(jax.tree.leaves(numbers(one)), jax.tree.leaves(numbers(other)), strict=True)
    return any(np.any(a != b) for a, b in pairs)


class Memory(NamedTuple):
    last: Trajectory


def recorder(batch_per_core: int, length: int = T) -> Agent:
    """An agent that keeps the last trajectory in its memory, acts by a rule, and learns a linear value by descent."""

    def initial_learner_state(key):
        step = TimeStep(jnp.zeros((batch_per_core, 3)), *(jnp.zeros(batch_per_core, d) for d in "ff??"))
        memory = Trajectory(
            jax.tree.map(lambda leaf: jnp.zeros((length + 1, *leaf.shape), leaf.dtype), step),
            ActorOutput(jnp.zeros((length, batch_per_core), jnp.int32)),
            jnp.zeros(batch_per_core, jnp.int32),
        )
        return LearnerState(jax.random.normal(key, (3,)), (), (), memory)

    def actor_step(params, count, timestep, key):
        start, line, steps = jnp.moveaxis(timestep.observation, -1, 0)
        action = (jnp.floor(10 * start) + line + steps).astype(jnp.int32) % 4
        return ActorOutput(action), count + 1

    def learner_step(state, trajectory, key, axis_name):
        timestep = trajectory.timestep

        def loss(weights):
            error = timestep.observation[1:] @ weights - timestep.reward[1:]
            return mesh.masked_mean(error**2, timestep.valid[1:], None)

        gradient = mesh.mean(jax.grad(loss)(state.params), axis_name)
        new = LearnerState(state.params - 1e-4 * gradient, (), (), trajectory)
        return new, {"norm": jnp.linalg.norm(gradient)}

    return Agent(initial_learner_state, lambda n: jnp.zeros(n, jnp.int32), actor_step, learner_step, name="recorder")


@functools.cache
def recording(num_cores: int, next_step: bool) -> tuple[list[Any], list[Any], Anakin]:
    """States (in numpy) after each of 6 updates of one decision rule, and their metrics."""
    env = ENV if next_step else dataclasses.replace(ENV, script=((3, False), (1, False), (5, False)), truncates=False)
    loop = Anakin(recorder(BATCH // num_cores), env, BATCH // num_cores, T, num_cores=num_cores)
    state, states, metrics = loop.init(3), [], []
    for _ in range(6):
        state, said = loop.step(state)
        states.append(numbers(state))
        metrics.append(numbers(said))
    return states, metrics, loop


def flat(memory: Trajectory) -> Trajectory:
    """Trajectory [T, N * B] from one per core."""
    side = lambda leaf: np.concatenate(list(leaf), axis=1)
    return Trajectory(
        jax.tree.map(side, memory.timestep), jax.tree.map(side, memory.actor_output), np.concatenate(memory.actor_state)
    )


@pytest.mark.parametrize("next_step", [True, False])
@pytest.mark.parametrize("num_cores", [1, CORES])
def test_episode_sums_are_those_of_the_script(num_cores, next_step):
    """Per update: count, returns, lengths, extremes of the episodes that ended, worked out from the script alone."""
    states, metrics, loop = recording(num_cores, next_step)
    script = loop.batch.env.script
    running, total = [[] for _ in range(BATCH)], 0
    for state, said in zip(states, metrics, strict=True):
        trajectory, ended = flat(state.learner.memory), []
        seen, action = trajectory.timestep.observation, trajectory.actor_output.action
        for b in range(BATCH):
            for t in range(T):
                start, line, steps = seen[t, b]
                over = steps == script[int(line)][0]  # next-step mode shows the final observation before the reset
                if not over:
                    running[b].append(start + 10 * (steps + 1) + action[t, b])
                last_step = steps + 1 == script[int(line)][0]
                if over if next_step else last_step:
                    assert len(running[b]) == script[int(line)][0]
                    ended.append((sum(running[b]), len(running[b])))
                    running[b] = []
        sums = jax.tree.map(lambda leaf: leaf[0], said.episodes)
        assert sums.count == len(ended)
        total += len(ended)
        if ended:
            np.testing.assert_allclose(sums.returns, sum(r for r, _ in ended), rtol=1e-5)
            np.testing.assert_allclose(sums.smallest, min(r for r, _ in ended), rtol=1e-5)
            np.testing.assert_allclose(sums.largest, max(r for r, _ in ended), rtol=1e-5)
            assert sums.lengths == sum(n for _, n in ended)
        else:
            assert (sums.returns, sums.lengths, sums.smallest, sums.largest) == (0, 0, np.inf, -np.inf)
    assert total > BATCH
    # What is still running goes on in the state.
    np.testing.assert_array_equal(states[-1].episodes.lengths, [len(each) for each in running])
    np.testing.assert_allclose(states[-1].episodes.returns, [sum(each) for each in running], rtol=1e-5)


@pytest.mark.parametrize("next_step", [True, False])
def test_trajectories_join_without_gap_or_overlap(next_step):
    """T + 1 time steps, the last of which is the first of the next update; the actor's state is from before them."""
    states, _, _ = recording(CORES, next_step)
    for update, (one, two) in enumerate(itertools.pairwise(states)):
        one, two = flat(one.learner.memory), flat(two.learner.memory)
        equal(jax.tree.map(lambda leaf: leaf[-1], one.timestep), jax.tree.map(lambda leaf: leaf[0], two.timestep))
        np.testing.assert_array_equal(two.actor_state, T * (update + 1))
    last = flat(states[-1].learner.memory)
    equal(jax.tree.map(lambda leaf: leaf[-1], last.timestep), states[-1].timestep)
    np.testing.assert_array_equal(states[-1].actor, 6 * T)
    assert states[-1].updates == 6
    first = flat(states[0].learner.memory).timestep
    assert first.first[0].all() and not first.valid[0].any()


@pytest.mark.parametrize("next_step", [True, False])
def test_environments_do_not_depend_on_the_core_they_live_on(next_step):
    """Every time step of every environment, on 1 core with 16 and on 8 with 2 each; and what is learned from them."""
    (one, metrics, _), (eight, metrics_of_eight, _) = recording(1, next_step), recording(CORES, next_step)
    for a, b in zip(one, eight, strict=True):
        equal(flat(a.learner.memory), flat(b.learner.memory))
        equal((a.env, a.timestep, a.episodes), (b.env, b.timestep, b.episodes))
    for a, b in zip(metrics, metrics_of_eight, strict=True):
        close(a.episodes, b.episodes)


def small(**settings):
    """A2C with plain descent and everything that is kept between updates switched on."""
    plain = {"optimizer": "sgd", "learning_rate": 0.05, "max_grad_norm": 1e6}
    config = Config(**{**plain, "normalize_observations": True, "normalize_rewards": True, **settings})
    return agents.a2c(CARTPOLE.spec, config, networks.mlp((8,)))


CARTPOLE = envs.CartPole(max_steps=6)


def greedy_only(agent: Agent) -> Agent:
    """The agent without its dice: the best action, noted as usual."""

    def actor_step(params, state, timestep, key):
        sampled, after = agent.actor_step(params, state, timestep, key)
        best, _ = agent.greedy_step(params, state, timestep, key)
        return ActorOutput(best.action, sampled.extras), after

    return dataclasses.replace(agent, actor_step=actor_step)


@functools.cache
def a2c_loop(updates_per_call: int) -> Anakin:
    return Anakin(small(), CARTPOLE, PER_CORE, T, updates_per_call)


def after_updates(loop: Anakin, updates: int, seed: int = 0):
    """The state after some updates, and the metrics of each."""
    state, said = loop.init(seed), []
    for _ in range(updates // loop.updates_per_call):
        state, metrics = loop.step(state)
        said.append(numbers(metrics))
    return state, jax.tree.map(lambda *leaves: np.concatenate(leaves), *said)


def test_one_core_and_eight_learn_the_same_from_the_same_environments():
    """Six updates of the whole loop by plain descent, without dice in the policy: 16 environments on 1 and 8 cores."""
    agent = greedy_only(small())
    one, metrics = after_updates(Anakin(agent, CARTPOLE, BATCH, T, 2, num_cores=1), 6)
    eight, metrics_of_eight = after_updates(Anakin(agent, CARTPOLE, PER_CORE, T, 2), 6)
    close(one.learner, eight.learner)
    close((one.env, one.timestep, one.episodes), (eight.env, eight.timestep, eight.episodes))
    close(metrics, metrics_of_eight)
    assert metrics.episodes.count.sum() > 0


def test_a_seed_decides_everything_to_the_bit_and_another_seed_changes_it():
    loop = a2c_loop(3)
    one, metrics = after_updates(loop, 6)
    two, same_metrics = after_updates(loop, 6)
    equal(one, two)
    equal(metrics, same_metrics)
    other, _ = after_updates(loop, 6, seed=1)
    for part in ("learner", "env", "timestep", "key"):
        assert differs(getattr(one, part), getattr(other, part)), part


@pytest.mark.parametrize("updates_per_call", [1, 2, 6])
def test_results_do_not_depend_on_how_many_updates_a_call_makes(updates_per_call):
    """To the bit: calls are only where the host looks."""
    wanted, metrics = after_updates(a2c_loop(3), 6)
    got, said = after_updates(a2c_loop(updates_per_call), 6)
    equal(got, wanted)
    equal(said, metrics)


def test_cores_draw_different_actions_and_their_replicas_stay_equal():
    """Each core's copy of what is replicated, after several updates; the dice differ from core to core and in time."""
    state, _ = after_updates(a2c_loop(3), 6)
    for leaf in jax.tree.leaves((state.learner.params, state.learner.opt_state, state.updates)):
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert len(copies) == CORES
        for copy in copies[1:]:
            np.testing.assert_array_equal(copy, copies[0])
    keyed = dataclasses.replace(
        recorder(PER_CORE),
        actor_step=lambda params, count, timestep, key: (
            ActorOutput(jax.random.randint(key, timestep.reward.shape, 0, 1 << 30)),
            count + 1,
        ),
    )
    loop = Anakin(keyed, ENV, PER_CORE, T)
    state, seen = loop.init(0), []
    for _ in range(3):
        state, _ = loop.step(state)
        seen += np.asarray(state.learner.memory.actor_output.action).ravel().tolist()
    assert len(set(seen)) == 3 * BATCH * T


def test_the_second_call_compiles_nothing_and_moves_nothing_to_or_from_the_host():
    """Counted by JAX itself; transfers are forbidden around the call. The agent's Python runs while tracing only."""
    traced, compiled = [], []
    agent = recorder(PER_CORE)

    def learner_step(*inputs):
        traced.append(1)
        return agent.learner_step(*inputs)

    loop = Anakin(dataclasses.replace(agent, learner_step=learner_step), ENV, PER_CORE, T, 2)
    state, _ = loop.step(loop.init(0))
    before = len(traced)

    def listen(event, duration, **_):
        if "compile" in event or "trac" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with jax.transfer_guard("disallow"):
            for _ in range(3):
                state, metrics = loop.step(state)
        jax.block_until_ready(metrics)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert (len(traced), compiled) == (before, [])
    assert int(state.updates) == 8


def test_the_state_is_donated():
    """What went in is gone, so that a run needs the memory of one state."""
    loop = a2c_loop(3)
    state = loop.init(0)
    leaves = jax.tree.leaves(state)
    after, _ = loop.step(state)
    assert all(leaf.is_deleted() for leaf in leaves)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(after))


MEMBERS = Members(seeds=(0, 0, 5, 5), floats={"learning_rate": (0.05, 0.01) * 2, "discount": (0.9, 0.99) * 2})


@functools.cache
def member_loop():
    return Anakin(small(), CARTPOLE, 4, T, 3, members=MEMBERS)


def test_members_are_the_single_runs_with_their_seeds_and_settings():
    """Four runs on four cores, two rates by two seeds, against runs of their own on one core."""
    loop = member_loop()
    assert loop.num_cores == 4
    state = loop.init(0)
    assert len({shard.device for shard in state.timestep.reward.addressable_shards}) == 4
    state, said = loop.step(state)
    state, said = loop.step(state)
    assert state.timestep.reward.shape == (4, 4) and said.learner["loss"].shape == (4, 3)
    for i, (rate, discount) in enumerate(((0.05, 0.9), (0.01, 0.99))):
        single = Anakin(small(learning_rate=rate, discount=discount), CARTPOLE, 4, T, 3, num_cores=1)
        for j, seed in enumerate((0, 5)):
            wanted, metrics = after_updates(single, 6, seed)
            at = 2 * j + i
            mine = jax.tree.map(lambda leaf, at=at: leaf[at], state)
            close((mine.learner, mine.env, mine.timestep), (wanted.learner, wanted.env, wanted.timestep), 1e-4)
            close(
                jax.tree.map(lambda leaf, at=at: leaf[at], said.learner),
                {k: v[3:] for k, v in metrics.learner.items()},
                1e-4,
            )
            close(
                jax.tree.map(lambda leaf, at=at: leaf[at], said.episodes),
                jax.tree.map(lambda v: v[3:], metrics.episodes),
                1e-4,
            )


def test_members_move_nothing_to_the_host_either_and_start_from_a_shifted_seed():
    loop = member_loop()
    state, _ = loop.step(loop.init(5))
    with jax.transfer_guard("disallow"):
        state, _ = loop.step(state)
    shifted, _ = loop.step(loop.init(5))
    plain, _ = loop.step(loop.init(0))
    # Seeds 5 + 0 are the third and fourth member's own.
    equal(jax.tree.map(lambda leaf: leaf[:2], shifted), jax.tree.map(lambda leaf: leaf[2:], plain))


class Broken(NamedTuple):
    """An environment that pays NaN while `start` is high, which is in some episodes only."""

    env: Any

    @property
    def spec(self):
        return self.env.spec

    def reset(self, key):
        return self.env.reset(key)

    def step(self, state, action, key):
        state, out = self.env.step(state, action, key)
        return state, out._replace(reward=jnp.where(state.start > 0.97, jnp.nan, 1e-3 * out.reward))


def test_a_reward_that_is_not_a_number_keeps_the_weights_and_is_counted():
    """Updates with such a reward change no weight; those without it go on learning."""
    agent = agents.a2c(ENV.spec, small().config, networks.mlp((8,)))
    loop = Anakin(agent, Broken(ENV), PER_CORE, T)
    state, skipped = loop.init(0), []
    for _ in range(12):
        before = numbers(state.learner.params.weights)
        state, metrics = loop.step(state)
        bad = int(metrics.learner["nonfinite_updates"][0])
        assert bad == int(not np.isfinite(metrics.learner["loss"][0]))
        assert differs(before, state.learner.params.weights) == (not bad)
        skipped.append(bad)
    assert 0 < sum(skipped) < 12
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(numbers(state.learner)))


def test_an_unroll_of_one_decision_works():
    loop = Anakin(recorder(PER_CORE, 1), ENV, PER_CORE, 1, 5)
    state, metrics = loop.step(loop.init(0))
    assert metrics.episodes.count.shape == (5,) and int(state.updates) == 5
    assert loop.steps_per_update == BATCH and loop.steps_per_call == 5 * BATCH


@pytest.mark.parametrize("prng", ["rbg", "unsafe_rbg"])
def test_other_generators_are_reproducible_too(prng):
    loop = Anakin(recorder(PER_CORE), ENV, PER_CORE, T, 2, prng=prng)
    (one, _), (two, _), (other, _) = (loop.step(loop.init(seed)) for seed in (0, 0, 1))
    equal(one, two)
    assert differs(one.timestep.observation, other.timestep.observation)
    starts = np.asarray(one.timestep.observation)[:, 0]
    assert len(set(starts.tolist())) == BATCH


@pytest.mark.parametrize("bad", [0, -1, 1.5, float("nan")])
@pytest.mark.parametrize("name", ["batch_per_core", "unroll_length", "updates_per_call"])
def test_sizes_that_cannot_work_are_refused_by_name(name, bad):
    sizes = {"batch_per_core": 2, "unroll_length": 2, "updates_per_call": 1, name: bad}
    with pytest.raises(UserError, match=f"^{name} is "):
        Anakin(recorder(2), ENV, **sizes)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (Members((), {}), "seeds"),
        (Members((0, 1), {"learning_rat": (0.1, 0.2)}), "learning_rat.*Did you mean 'learning_rate'"),
        (Members((0, 1), {"learning_rate": (0.1, 0.2, 0.3)}), "learning_rate.*3.*2"),
        (Members((0, 1), {"learning_rate": (0.1, float("nan"))}), "learning_rate is nan"),
        (Members((0, 1), {"discount": (0.9, 1.5)}), "discount is 1.5"),
        (Members((0, 1), {"optimizer": (0.1, 0.2)}), "optimizer.*float"),
    ],
)
def test_members_that_cannot_work_are_refused_before_anything_is_traced(members, message):
    with pytest.raises(UserError, match=message):
        Anakin(small(), CARTPOLE, 2, T, members=members)


def test_a_replay_must_fit_as_often_as_there_are_runs_on_a_core(monkeypatch):
    """Each of 8 cores has 1 MB: enough for one replay of 0.6 MB, not for the two of 16 members."""
    monkeypatch.setattr(replays, "machine_bytes", lambda: 8_000_000)
    agent = dataclasses.replace(small(), replay=ReplaySize(1000, 600_000))
    assert Anakin(agent, CARTPOLE, 2, T).runs_per_core == 1
    assert Anakin(agent, CARTPOLE, 2, T, members=Members(tuple(range(8)))).runs_per_core == 1
    loop, said = Anakin(agent, CARTPOLE, 2, T, num_cores=1, members=Members(tuple(range(8)))), []
    _introduce(Run(agent, CARTPOLE, loop, Settings(), None, state=None), 0, said.append, ())
    assert said[1] == "replay of 1,000 decisions x 8 runs: 5 MB per learner core"
    with pytest.raises(UserError, match="1,000 decisions x 600 B x 2 runs per core"):
        Anakin(agent, CARTPOLE, 2, T, members=Members(tuple(range(16))))


def test_an_agent_that_cannot_be_rebuilt_is_not_swept():
    with pytest.raises(UserError, match="recorder has no `rebuild`"):
        Anakin(recorder(2), ENV, 2, T, members=Members((0, 1), {"learning_rate": (0.1, 0.2)}))
    Anakin(recorder(2), ENV, 2, T, members=Members((0, 1)))
