"""The ring, its sampling and the sequences in it, against plain Python."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muzero import limiter, replay, sequences
from muzero.replay import Replay, Sample
from podracer import mesh, specs
from podracer.errors import UserError
from podracer.types import ActorOutput, TimeStep, Trajectory
from tests.contracts.agents import SPECS, fast_jit, timesteps
from tests.podracer.test_policies import chi_square

L, K, A = 4, 2, 4
S = L - K + 1
SPEC = specs.Spec("numbers", {"observation": specs.Array((2,)), "small": specs.Array((), np.int32)}, specs.Discrete(A))


def memory_of(capacity=7, prioritised=False, **more):
    return Replay(SPEC, A, capacity, L, K, prioritised=prioritised, **more)


def batch(number, offset, ends=()):
    """Sequences [number, ...] whose numbers say which they are: sequence i, position t holds 100 i + t."""
    each = 100 * (offset + np.arange(number))[:, None] + np.arange(L + 1)[None]
    numbers = each.astype(np.float32)
    valid = np.ones((number, L + 1), bool)
    for i, t in ends:
        valid[i, t] = False
    observation = {"observation": np.stack([numbers, -numbers], -1), "small": each.astype(np.int32)}
    timestep = TimeStep((), numbers, np.ones_like(numbers), ~valid, valid)
    action = each[:, :L].astype(np.int32)
    policy = np.broadcast_to(numbers[:, :L, None], (number, L, A))
    return sequences.Sequence(*jax.tree.map(jnp.asarray, (observation, timestep, action, policy, numbers[:, :L])))


@pytest.mark.parametrize("sizes", [(3, 3, 3, 3), (2, 5, 4, 7, 1), (7, 7), (1,) * 9])
def test_the_ring_keeps_the_newest_sequences_whole(sizes):
    """Against a list; the write head wraps around in the middle of a batch."""
    it, kept, offset = memory_of(), [None] * 7, 0
    memory, insert = it.initial(), jax.jit(it.insert)
    head = 0
    for size in sizes:
        memory = insert(memory, batch(size, offset))
        for i in range(size):
            kept[(head + i) % 7] = offset + i
        head, offset = (head + size) % 7, offset + size
        assert int(memory.head) == head and int(memory.count) == min(offset, 7)
        stored = jax.device_get(memory.sequences)
        for row, which in enumerate(kept):
            if which is not None:
                wanted = jax.device_get(batch(1, which))
                jax.tree.map(lambda a, b, row=row: np.testing.assert_array_equal(a[row], b[0]), stored, wanted)


def test_uniform_samples_are_uniform_over_what_is_there():
    """Each start of each stored sequence, and no other, equally often."""
    it = memory_of()
    memory = it.insert(it.initial(), batch(5, 0))
    sample = jax.jit(lambda key: it.sample(memory, key, 20_000))(jax.random.key(0))
    counts = np.zeros((7, L))
    np.add.at(counts, (np.asarray(sample.row), np.asarray(sample.start)), 1)
    probabilities = np.zeros((7, L))
    probabilities[:5, :S] = 1 / (5 * S)
    assert abs(chi_square(counts.ravel(), probabilities.ravel())) < 5  # which includes that no other comes up
    np.testing.assert_array_equal(sample.probability, 1.0)


def test_priorities_decide_how_often():
    """Frequencies and the reported probabilities against numpy; priority 0 never comes up."""
    it = memory_of(prioritised=True)
    memory = it.insert(it.initial(), batch(5, 0))
    rng = np.random.default_rng(0)
    priority = np.zeros((7, S), np.float32)
    priority[:5] = rng.uniform(0.1, 3, (5, S)) * (rng.random((5, S)) < 0.7)
    memory = memory._replace(priority=jnp.asarray(priority))
    sample = jax.device_get(jax.jit(lambda key: it.sample(memory, key, 50_000))(jax.random.key(1)))
    share = priority / priority.sum()
    np.testing.assert_allclose(sample.probability, share[sample.row, sample.start] * 5 * (S), rtol=1e-5)
    counts = np.zeros((7, S))
    np.add.at(counts, (sample.row, sample.start), 1)
    assert abs(chi_square(counts.ravel(), share.ravel())) < 5  # which includes that priority 0 never comes up
    weight = replay.importance(jax.tree.map(jnp.asarray, sample), 0.4, None)
    by_hand = (1 / sample.probability) ** 0.4
    np.testing.assert_allclose(weight, by_hand / by_hand.max(), rtol=1e-5)


def test_new_sequences_get_the_largest_priority_and_old_ones_what_their_error_says():
    it = memory_of(prioritised=True)
    memory = it.insert(it.initial(), batch(3, 0, ends=[(1, 2)]))
    wanted = np.zeros((7, S), np.float32)
    wanted[:3] = 1
    wanted[1, 1] = 0  # the decision that led to position 2 was ignored: nothing to learn from it
    np.testing.assert_array_equal(memory.priority, wanted)
    sample = Sample(jnp.array([0, 1, 1]), jnp.array([2, 0, 1]), jnp.ones(3))
    memory = it.reprioritise(memory, sample, jnp.array([-3.999, 0.249, 5.0]), 0.5)
    wanted[0, 2], wanted[1, 0] = 2.0, 0.5
    np.testing.assert_allclose(memory.priority, wanted, rtol=1e-5)
    memory = it.reprioritise(memory, sample, jnp.array([jnp.nan, jnp.inf, 1.0]), 0.5)
    np.testing.assert_allclose(memory.priority, wanted, rtol=1e-5)
    memory = it.insert(memory, batch(1, 3))
    wanted[3] = 2.0
    np.testing.assert_allclose(memory.priority, wanted, rtol=1e-5)


def test_the_largest_importance_weight_is_1_over_all_cores():
    probability = jnp.linspace(0.2, 3.0, 16)
    one = replay.importance(Sample(probability, probability, probability), 0.7, None)

    def call(part):
        return replay.importance(Sample(part, part, part), 0.7, mesh.CORE)

    eight = fast_jit(mesh.over_cores(call, mesh.make(8), mesh.SHARDED, mesh.SHARDED))(probability)
    np.testing.assert_allclose(one, eight, rtol=1e-6)
    assert float(jnp.max(one)) == 1.0


def test_no_draw_finds_a_row_without_priority_however_it_is_rounded():
    """XLA adds up 2,048 numbers as a tree, whose sums may rise or fall by a rounding where a row has nothing to add.

    The draws are multiples of 2**-23, as JAX's are: all around each row's border, and the largest ones.
    """
    rows, grid = 2048, 2.0**-23
    invert = fast_jit(replay._invert)
    near = np.arange(-2, 3)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        weights = np.zeros(rows, np.float32)
        weights[: rows // 2] = rng.uniform(0.1, 9, rows // 2) * (rng.random(rows // 2) < (0.5 if seed % 2 else 1.0))
        share = np.cumsum(weights, dtype=np.float64) / np.sum(weights, dtype=np.float64)
        places = np.concatenate([(np.floor(share / grid)[:, None] + near).ravel(), 1 / grid - np.arange(1, 65)])
        draws = (np.clip(places, 0, 1 / grid - 1) * grid).astype(np.float32)
        found = np.asarray(invert(jnp.asarray(weights[None]), jnp.asarray(draws[None])))[0]
        assert np.all(weights[found] > 0)
        # As wanted, but for the rounding of 2,048 sums.
        assert np.all(share[found] >= draws - 1e-5) and np.all((share - weights / weights.sum())[found] <= draws + 1e-5)


def test_half_filled_rings_of_2048_rows_give_no_empty_row_over_many_keys():
    it = memory_of(capacity=2048, prioritised=True)

    def draw(key):
        ring_key, key = jax.random.split(key)
        priority = jax.random.uniform(ring_key, (2048, S), minval=0.1, maxval=9.0).at[1024:].set(0.0)
        return it.sample(it.initial()._replace(priority=priority, count=jnp.int32(1024)), key, 4096)

    sample = fast_jit(jax.vmap(draw))(jax.random.split(jax.random.key(0), 200))
    assert int(jnp.max(sample.row)) < 1024 and float(jnp.min(sample.probability)) > 0


def test_a_start_that_should_not_have_been_drawn_weighs_nothing():
    """The largest weight is that of starts with a probability; where none has any, nothing is learnt, and no NaN."""
    probability = jnp.array([0.5, 0.0, 2.0, 0.0])
    weight = replay.importance(Sample(probability, probability, probability), 0.4, None)
    np.testing.assert_allclose(weight, [1.0, 0.0, 0.25**0.4, 0.0], rtol=1e-6)
    nothing = jnp.zeros(4)
    np.testing.assert_array_equal(replay.importance(Sample(nothing, nothing, nothing), 0.4, None), nothing)
    memory = memory_of(prioritised=True).initial()
    assert not np.any(memory_of(prioritised=True).sample(memory, jax.random.key(0), 8).probability)


def test_a_trajectory_larger_than_the_memory_is_refused():
    it = memory_of(capacity=2)
    with pytest.raises(UserError, match=r"one trajectory is 12 decisions .* replay_steps is 8.*Raise replay_steps"):
        it.insert(it.initial(), batch(3, 0))


def test_bytes_are_counted_from_the_shapes():
    spec = specs.Spec("bytes", specs.Array((4, 8, 6), np.uint8), specs.Discrete(A))
    plain = Replay(spec, A, 10, L, K)
    numbers = (
        10 * ((L + 1) * (4 + 4 + 1 + 1) + L * (4 + 4 * A + 4)) + 8
    )  # reward, discount, flags; action, policy, value
    assert plain.num_bytes() == 10 * (L + 1) * 4 * 8 * 6 + numbers
    assert Replay(spec, A, 10, L, K, frame_stack=4).num_bytes() == 10 * ((L + 4) * 8 * 6 + L + 1) + numbers
    assert Replay(spec, A, 10, L, K, prioritised=True).num_bytes() == plain.num_bytes() + 10 * (S) * 4
    real = sum(leaf.nbytes for leaf in jax.tree.leaves(plain.initial()))
    assert plain.num_bytes() == real


def trajectory_of(spec, steps, batch_size, seed=0):
    timestep = timesteps(spec, seed, steps, batch_size)
    rng = np.random.default_rng(seed)
    action = jnp.asarray(rng.integers(1, A, (steps, batch_size)), jnp.int32)
    policy = jnp.asarray(rng.dirichlet(np.ones(A), (steps, batch_size)), jnp.float32)
    value = jnp.asarray(rng.normal(size=(steps, batch_size)), jnp.float32)
    return Trajectory(timestep, ActorOutput(action), ()), policy, value


@pytest.mark.parametrize("pieces", [1, 3])
def test_trajectories_are_cut_into_sequences_that_share_their_border(pieces):
    trajectory, policy, value = trajectory_of(SPECS["dict"], pieces * L, 6)
    found = jax.device_get(sequences.cut(trajectory, policy, value, L))
    wanted = jax.device_get((trajectory, policy, value))
    assert found.value.shape == (6 * pieces, L)
    for piece in range(pieces):
        for b in range(6):
            i, times, decisions = (
                piece * 6 + b,
                slice(piece * L, (piece + 1) * L + 1),
                slice(piece * L, (piece + 1) * L),
            )
            timestep = wanted[0].timestep
            same = lambda one, other, i=i, t=times, b=b: np.testing.assert_array_equal(one[i], other[t, b])
            jax.tree.map(same, found.observation, timestep.observation)
            jax.tree.map(same, found.timestep._replace(observation=()), timestep._replace(observation=()))
            np.testing.assert_array_equal(found.action[i], wanted[0].actor_output.action[decisions, b])
            np.testing.assert_array_equal(found.policy[i], wanted[1][decisions, b])
            np.testing.assert_array_equal(found.value[i], wanted[2][decisions, b])


def test_an_unroll_length_that_sequences_do_not_divide_is_refused():
    with pytest.raises(UserError, match=r"6 decisions .*sequence_length = 4 does not divide.*sequence_length to 6"):
        sequences.cut(*trajectory_of(SPECS["discrete"], 6, 2), L)


def test_what_was_ignored_leaves_no_trace_and_a_nan_takes_its_sequence_with_it():
    trajectory, policy, value = trajectory_of(SPECS["discrete"], L, 16)
    raw = sequences.cut(trajectory, policy, value, L)
    clean, whole = sequences.harmless(raw)
    valid = np.asarray(raw.timestep.valid)
    assert whole.all() and (~valid).any()
    for now, before, zero in (
        (clean.timestep.reward, raw.timestep.reward, 0),
        (clean.timestep.discount, raw.timestep.discount, 1),
    ):
        np.testing.assert_array_equal(now, np.where(valid, before, zero))
    np.testing.assert_array_equal(clean.action, np.where(valid[:, 1:], raw.action, 0))
    np.testing.assert_array_equal(clean.policy, np.where(valid[:, 1:, None], raw.policy, 0))
    np.testing.assert_array_equal(clean.value, raw.value)
    # Not a number where it was ignored: no harm. Elsewhere: that sequence alone is dropped.
    ignored = tuple(np.argwhere(~valid[:, 1:])[0])
    taken = tuple(np.argwhere(valid[:, 1:])[-1])
    assert ignored[0] != taken[0]
    noisy = raw._replace(
        timestep=raw.timestep._replace(reward=raw.timestep.reward.at[ignored[0], ignored[1] + 1].set(jnp.nan))
    )
    jax.tree.map(np.testing.assert_array_equal, sequences.harmless(noisy), (clean, whole))
    for broken in (
        raw._replace(
            timestep=raw.timestep._replace(reward=raw.timestep.reward.at[taken[0], taken[1] + 1].set(jnp.nan))
        ),
        raw._replace(value=raw.value.at[taken].set(jnp.inf)),
        raw._replace(observation=raw.observation.at[taken].set(-jnp.inf)),
    ):
        mended, whole = sequences.harmless(broken)
        assert np.flatnonzero(~np.asarray(whole)).tolist() == [taken[0]]
        assert not mended.timestep.valid[taken[0]].any()
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(mended))
        others = np.arange(16) != taken[0]
        jax.tree.map(lambda a, b, o=others: np.testing.assert_array_equal(a[o], b[o]), mended, clean)


@pytest.mark.parametrize("ratio", [0.5, 1 / 3, 0.1, 2.7, 7.3, 0.001])
def test_the_limiter_is_exact_over_a_million_trajectories(ratio):
    """Gradient steps = floor(trajectories x ratio), to within one, however long the run is."""
    steps = 1_000_000

    @jax.jit
    def run():
        def one(carry, _):
            state, total = carry
            state, number = limiter.earn(state, ratio)
            return (state, total + number), (number, state.credit)

        (_, total), (numbers, credit) = jax.lax.scan(one, (limiter.initial(), 0), None, steps)
        return total, jnp.max(numbers), jnp.min(numbers), jnp.max(credit), jnp.min(credit)

    total, most, least, high, low = run()
    assert abs(int(total) - steps * float(np.float32(ratio))) <= 1
    assert int(most) <= np.ceil(ratio) and int(least) >= np.floor(ratio)
    assert low >= 0 and high < 1
