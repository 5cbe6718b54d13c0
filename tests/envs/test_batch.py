"""Batches that reset themselves, against a loop in numpy."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.envs import Batch, Catch, GridWorld, TimeLimit, api
from podracer.errors import UserError
from tests.envs.scripted import Scripted, reference

BATCH, UNROLL = 16, 24


@functools.partial(jax.jit, static_argnums=0)
def unroll(batch: Batch, keys, actions):
    """All time steps [T + 1, B] of a batch that is given these keys [T + 1, B] and actions [T, B]."""
    state, first = batch.init(keys[0])
    _, rest = jax.lax.scan(lambda state, xs: batch.step(state, *xs), state, (actions, keys[1:]))
    return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, rest)


def inputs(seed=0, length=UNROLL, size=BATCH):
    keys = jax.random.split(jax.random.key(seed), (length + 1, size))
    return keys, np.random.default_rng(seed).integers(0, 4, (length, size)).astype(np.int32)


ENDING = ((3, False), (1, False), (2, False))


@pytest.mark.parametrize(
    ("env", "mode", "next_step"),
    [
        (Scripted(), "auto", True),
        (Scripted(ENDING, truncates=False), "auto", False),
        (Scripted(ENDING, truncates=False), "next-step", True),
        (Scripted(((1, False),), truncates=False), "auto", False),
        (Scripted(((1, True),)), "auto", True),
    ],
)
def test_time_steps_equal_a_numpy_loop(env, mode, next_step):
    keys, actions = inputs()
    got = unroll(Batch(env, mode), keys, actions)
    expected = reference(env, next_step, keys, actions)
    for name, value in expected.items():
        np.testing.assert_allclose(np.asarray(getattr(got, name)), value, rtol=1e-6, err_msg=name)
    assert got.reward.dtype == got.discount.dtype == jnp.float32
    assert got.first.dtype == got.valid.dtype == jnp.bool_


def test_the_mode_follows_from_the_spec():
    ending = Scripted(ENDING, truncates=False)
    assert Batch(Scripted()).next_step and Batch(Scripted(), "next-step").next_step
    assert not Batch(ending).next_step and not Batch(ending, "same-step").next_step


def test_a_cut_episode_keeps_its_discount_and_its_final_observation():
    keys, actions = inputs()
    got = jax.tree.map(np.asarray, unroll(Batch(Scripted(((4, True),))), keys, actions))
    assert (got.discount == 1).all()
    # Period 5: four steps and a reset. The observation before each reset is the true final one.
    assert (got.first[::5]).all() and got.first.sum() == BATCH * 5
    assert (got.observation[4::5, :, 2] == 4).all()
    assert (got.observation[5::5, :, 2] == 0).all()
    assert (got.valid[1:5]).all() and not got.valid[5].any()
    assert (got.reward[5] == 0).all()


def test_the_action_of_a_resetting_step_is_ignored():
    keys, actions = inputs()
    env = Batch(Scripted(((2, True),)))
    other = actions.copy()
    other[2::3] = (other[2::3] + 1) % 4
    same = jax.tree.map(np.array_equal, unroll(env, keys, actions), unroll(env, keys, other))
    assert all(same)


def start_states(starts, seed=0, length=40, ratio=16):
    """Distinct start states after the first episodes, and in each step."""
    keys, actions = inputs(seed, length)
    got = jax.tree.map(
        np.asarray, unroll(Batch(Scripted(((2, False),), False), starts=starts, optimistic_ratio=ratio), keys, actions)
    )
    later = got.observation[1:][got.first[1:]][:, 0]
    per_step = [len(np.unique(got.observation[t, got.first[t], 0])) for t in range(1, length + 1) if got.first[t].any()]
    return set(got.observation[0, :, 0].tolist()), set(later.tolist()), per_step


def test_fresh_starts_never_repeat():
    first, later, per_step = start_states("fresh")
    assert len(later) == BATCH * 20 and not first & later
    assert per_step == [BATCH] * 20


def test_cached_starts_are_those_of_the_first_episodes():
    first, later, _ = start_states("cached")
    assert later <= first
    assert len(later) > BATCH // 2  # all 320 draws among 16


@pytest.mark.parametrize("ratio", [4, 16])
def test_optimistic_starts_compute_a_fraction(ratio):
    first, later, per_step = start_states("optimistic", ratio=ratio)
    assert not first & later
    assert per_step == [BATCH // ratio] * 20


def test_optimistic_starts_differ_where_few_episodes_end():
    env = Scripted(((7, False), (11, False), (13, False)), False)
    keys, actions = inputs(length=60)
    got = jax.tree.map(np.asarray, unroll(Batch(env, starts="optimistic", optimistic_ratio=4), keys, actions))
    for t in range(1, 61):
        ended = got.first[t]
        assert len(np.unique(got.observation[t, ended, 0])) == min(ended.sum(), BATCH // 4)


def test_optimistic_resets_are_that_many():
    env, sizes = Scripted(), []

    @jax.custom_batching.custom_vmap
    def reset(key):
        return env.reset(key)

    @reset.def_vmap
    def count(size, batched, key):
        sizes.append(size)
        starts = jax.vmap(env.reset)(key)
        return starts, jax.tree.map(lambda _: True, starts)

    counting = types.SimpleNamespace(spec=env.spec, reset=reset, step=env.step)
    batch = Batch(counting, starts="optimistic", optimistic_ratio=8)
    keys = jax.random.split(jax.random.key(0), BATCH)
    state, _ = jax.eval_shape(batch.init, keys)
    assert sizes == [BATCH]
    jax.eval_shape(batch.step, state, jnp.zeros(BATCH, jnp.int32), keys)
    assert sizes == [BATCH, BATCH // 8]


def test_time_limit_truncates_but_a_termination_wins():
    env = TimeLimit(Scripted(((3, False), (5, False)), False), 3)
    assert env.spec.truncates and env.spec.max_episode_steps == 3
    step = jax.jit(env.step)
    for seed in range(6):
        state, observation = env.reset(jax.random.key(seed))
        ends = []
        for _ in range(3):
            state, out = step(state, jnp.int32(0), jax.random.key(0))
            ends.append((bool(out.terminated), bool(out.truncated)))
        short = int(observation[1]) == 0
        assert ends == [(False, False)] * 2 + [(short, not short)]


def test_time_limits_take_python_bools():
    env = types.SimpleNamespace(
        spec=Scripted().spec, reset=lambda key: (0, 0.0), step=lambda state, action, key: (0, (0.0, 1.0, False, False))
    )
    limited = TimeLimit(env, 1)
    _, out = limited.step(limited.reset(None)[0], 0, None)
    assert out.truncated.dtype == bool and out.truncated


def test_time_limits_nest():
    assert TimeLimit(TimeLimit(Catch(), 5), 9).spec.max_episode_steps == 5
    assert TimeLimit(GridWorld(max_steps=50), 9).spec.max_episode_steps == 9


def test_a_limited_environment_is_reset_with_its_counter():
    keys, actions = inputs()
    got = jax.tree.map(np.asarray, unroll(Batch(TimeLimit(Scripted(((9, False),), False), 3)), keys, actions))
    assert (got.observation[3::4, :, 2] == 3).all()
    assert (got.discount == 1).all()


@pytest.mark.parametrize(
    ("low", "high", "action", "expected"),
    [
        ((-2.0, 0.0), (2.0, 10.0), (0.5, -1.0), (1.0, 0.0)),
        ((-2.0, 0.0), (2.0, 10.0), (3.0, 0.0), (2.0, 5.0)),
        ((-np.inf, 0.0), (np.inf, np.inf), (7.0, -3.0), (7.0, 0.0)),
    ],
)
def test_bounded_actions_are_rescaled_and_clipped(low, high, action, expected):
    from podracer.envs.batch import to_environment

    got = to_environment(api.Continuous(low, high), jnp.asarray(action))
    np.testing.assert_allclose(got, expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Batch(Scripted(), "same-step"), "same-step resets lose the final observation.*next-step"),
        (lambda: Batch(Catch(), "samestep"), "unknown mode 'samestep'. Did you mean 'same-step'"),
        (lambda: Batch(Catch(), starts="cache"), "unknown starts 'cache'. Did you mean 'cached'"),
        (lambda: TimeLimit(Catch(), 0), "max_steps is 0"),
        (
            lambda: Batch(Catch(), starts="optimistic", optimistic_ratio=5).init(
                jax.random.split(jax.random.key(0), 8)
            ),
            "batch size = 8 does not divide into optimistic_ratio = 5",
        ),
    ],
)
def test_mistakes_are_user_errors(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_a_reset_that_disagrees_with_step_is_named():
    class Sloppy(Scripted):
        def step(self, state, action, key):
            state, out = super().step(state, action, key)
            return state._replace(steps=state.steps * 1.0), out

    batch = Batch(Sloppy())
    keys = jax.random.split(jax.random.key(0), 2)
    state, _ = jax.eval_shape(batch.init, keys)
    with pytest.raises(UserError, match=r"scripted: state.steps is int32\[\] after reset and float32\[\] after step"):
        jax.eval_shape(batch.step, state, jnp.zeros(2, jnp.int32), keys)
