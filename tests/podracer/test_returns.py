"""Returns against their definitions, episode by episode, on data from which the resets have been taken out."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import returns
from podracer.types import TimeStep

GAMMA = 0.9


class Data(NamedTuple):
    """A trajectory of B environments and what the learner thinks of it."""

    timestep: TimeStep  # [T + 1, B]
    values: np.ndarray  # [T + 1, B]
    log_rho: np.ndarray  # [T, B]


def random_data(seed: int, length: int, batch_size: int, next_step: bool, end_probability: float = 0.35) -> Data:
    """Random rewards, values and episode ends; in next-step mode some ends are truncations and resets follow them."""
    rng = np.random.default_rng(seed)
    shape = (length + 1, batch_size)
    reward, discount = rng.normal(size=shape).astype(np.float32), np.ones(shape, np.float32)
    first, valid = np.zeros(shape, bool), np.ones(shape, bool)
    for b in range(batch_size):
        over = rng.random() < end_probability  # the unroll may start at a final observation
        for t in range(1, length + 1):
            if over:
                first[t, b], valid[t, b], over = True, False, False
                continue
            if rng.random() < end_probability:
                truncated = next_step and rng.random() < 0.5
                discount[t, b] = 1.0 if truncated else 0.0
                over = next_step
                first[t, b] = not next_step
    first[0] = rng.random(batch_size) < 0.5
    timestep = TimeStep(np.zeros(shape, np.float32), reward, discount, first, valid)
    return Data(timestep, rng.normal(size=shape).astype(np.float32), 0.5 * rng.normal(size=(length, batch_size)))


def hand_made(reward, discount, valid, values) -> Data:
    """One environment, from lists over the T + 1 time steps."""
    column = [np.asarray(each, np.float32)[:, None] for each in (reward, discount, valid, values)]
    first = column[2] == 0
    timestep = TimeStep(np.zeros_like(column[0]), column[0], column[1], first, column[2].astype(bool))
    return Data(timestep, column[3], np.zeros((len(reward) - 1, 1)))


class Piece(NamedTuple):
    """Consecutive real transitions of one episode; no reset is among them."""

    at: list[int]  # decisions, as indices into the trajectory
    reward: list[float]  # of the transition after each
    value: list[float]  # before each
    rho: list[float]
    last: float  # value of what follows the piece: 0 after a termination


def pieces(data: Data, b: int):
    """The episodes of environment `b`, or the parts of them that lie in the unroll."""
    timestep = data.timestep
    open_piece = Piece([], [], [], [], 0.0)
    for t in range(timestep.reward.shape[0] - 1):
        if not timestep.valid[t + 1, b]:
            if open_piece.at:  # cut by a time limit just before: the value of the final observation counts
                yield open_piece._replace(last=float(data.values[t, b]))
            open_piece = Piece([], [], [], [], 0.0)
            continue
        open_piece.at.append(t)
        open_piece.reward.append(float(timestep.reward[t + 1, b]))
        open_piece.value.append(float(data.values[t, b]))
        open_piece.rho.append(float(np.exp(data.log_rho[t, b])))
        if timestep.discount[t + 1, b] == 0:
            yield open_piece._replace(last=0.0)
            open_piece = Piece([], [], [], [], 0.0)
    if open_piece.at:
        yield open_piece._replace(last=float(data.values[-1, b]))


def n_step(piece: Piece, start: int, n: int) -> float:
    """`sum_k gamma^k r_{start + k} + gamma^n V`, with fewer than n terms where the piece ends."""
    n = min(n, len(piece.at) - start)
    after = [*piece.value, piece.last][start + n]
    return sum(GAMMA**k * piece.reward[start + k] for k in range(n)) + GAMMA**n * after


def lambda_return(piece: Piece, start: int, lambda_: float) -> float:
    """`(1 - lambda) sum_n lambda^(n - 1) G^(n)`, the longest one with the weight of all that would follow."""
    longest = len(piece.at) - start
    total = sum((1 - lambda_) * lambda_ ** (n - 1) * n_step(piece, start, n) for n in range(1, longest))
    return total + lambda_ ** (longest - 1) * n_step(piece, start, longest)


def gae_sum(piece: Piece, start: int, lambda_: float) -> float:
    """`sum_l (gamma lambda)^l delta_{start + l}` (Schulman et al. 2016, equation 16)."""
    values = [*piece.value, piece.last]
    deltas = [r + GAMMA * values[i + 1] - values[i] for i, r in enumerate(piece.reward)]
    return sum((GAMMA * lambda_) ** (i - start) * deltas[i] for i in range(start, len(deltas)))


def vtrace_target(piece: Piece, start: int, lambda_: float, clip_rho: float) -> float:
    """Espeholt et al. 2018, equation 1, with c_i = lambda min(1, rho_i) (remark 2)."""
    values = [*piece.value, piece.last]
    total, trace = values[start], 1.0
    for i in range(start, len(piece.at)):
        delta = min(clip_rho, piece.rho[i]) * (piece.reward[i] + GAMMA * values[i + 1] - values[i])
        total += trace * delta
        trace *= GAMMA * lambda_ * min(1.0, piece.rho[i])
    return total


def check(data: Data, got: np.ndarray, expected, at_resets) -> None:
    """`got` [T, B] is `expected(piece, i)` at every real transition and `at_resets` [T, B] at the others."""
    wanted = np.array(at_resets, np.float64)
    for b in range(wanted.shape[1]):
        for piece in pieces(data, b):
            for i, t in enumerate(piece.at):
                wanted[t, b] = expected(piece, i)
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


@functools.partial(jax.jit, static_argnames=("name", "args"))
def run(name, timestep, values, args, log_rho=None):
    step = returns.transitions(timestep, values, GAMMA)
    return getattr(returns, name)(step, *(() if log_rho is None else (log_rho,)), *args)


def call(name, data: Data, *args, with_rho=False):
    timestep, values = jax.tree.map(jnp.asarray, data.timestep), jnp.asarray(data.values)
    return run(name, timestep, values, args, jnp.asarray(data.log_rho, jnp.float32) if with_rho else None)


LENGTHS = (1, 2, 9)
DATA = [(length, next_step, seed) for length in LENGTHS for next_step in (True, False) for seed in range(6)]
each_data = pytest.mark.parametrize(("length", "next_step", "seed"), DATA)


@each_data
def test_gae_is_the_sum_of_discounted_errors_within_an_episode(length, next_step, seed):
    data = random_data(seed, length, 8, next_step)
    got = call("gae", data, 0.7)
    check(data, got, lambda piece, i: gae_sum(piece, i, 0.7), np.zeros_like(data.log_rho))


@each_data
def test_lambda_returns_average_all_n_step_returns_of_an_episode(length, next_step, seed):
    data = random_data(seed, length, 8, next_step)
    got = call("lambda_returns", data, 0.7)
    check(data, got, lambda piece, i: lambda_return(piece, i, 0.7), data.values[:-1])


@pytest.mark.parametrize("n", [1, 2, 3, 9, 20])
@pytest.mark.parametrize(("length", "next_step", "seed"), [case for case in DATA if case[2] < 3])
def test_n_step_returns_add_n_rewards_of_an_episode(n, length, next_step, seed):
    data = random_data(seed, length, 8, next_step)
    got = call("n_step_returns", data, n)
    check(data, got, lambda piece, i: n_step(piece, i, n), data.values[:-1])


@each_data
@pytest.mark.parametrize(("lambda_", "clip_rho", "clip_pg_rho"), [(1.0, 1.0, 1.0), (0.8, 1.3, 0.9)])
def test_vtrace_targets_and_advantages_follow_the_paper(length, next_step, seed, lambda_, clip_rho, clip_pg_rho):
    """Targets are equation 1 of the paper. Advantages are rho (r + gamma v' - V); v' mixes in V with 1 - lambda."""
    data = random_data(seed, length, 8, next_step)
    got = call("vtrace", data, lambda_, clip_rho, clip_pg_rho, with_rho=True)
    check(data, got.target, lambda piece, i: vtrace_target(piece, i, lambda_, clip_rho), data.values[:-1])

    def advantage(piece, i):
        if i + 1 < len(piece.at):
            v, value = vtrace_target(piece, i + 1, lambda_, clip_rho), piece.value[i + 1]
            following = lambda_ * v + (1 - lambda_) * value
        else:
            following = piece.last
        return min(clip_pg_rho, piece.rho[i]) * (piece.reward[i] + GAMMA * following - piece.value[i])

    check(data, got.advantage, advantage, np.zeros_like(data.log_rho))


@each_data
def test_vtrace_of_the_acting_policy_is_gae_of_lambda_1_and_the_n_step_return(length, next_step, seed):
    """Without lag there is nothing to correct."""
    data = random_data(seed, length, 8, next_step)._replace(log_rho=np.zeros((length, 8)))
    got = call("vtrace", data, with_rho=True)
    np.testing.assert_allclose(got.target, data.values[:-1] + call("gae", data, 1.0), atol=1e-5)
    np.testing.assert_allclose(got.target, call("n_step_returns", data, length), atol=1e-5)
    np.testing.assert_allclose(got.advantage, got.target - data.values[:-1], atol=1e-5)


def test_an_episode_cut_at_the_last_index_bootstraps_its_final_observation_and_a_terminated_one_does_not():
    """Worked by hand: 1 + 0.9 * (2 + 0.9 * 10) = 10.9, and 1 + 0.9 * 2 = 2.8."""
    cut = hand_made([0, 1, 2], [1, 1, 1], [1, 1, 1], [5, 6, 10])
    ended = hand_made([0, 1, 2], [1, 1, 0], [1, 1, 1], [5, 6, 10])
    np.testing.assert_allclose(call("lambda_returns", cut, 1.0)[:, 0], [10.9, 11.0], rtol=1e-6)
    np.testing.assert_allclose(call("lambda_returns", ended, 1.0)[:, 0], [2.8, 2.0], rtol=1e-6)


def test_episodes_of_one_step_between_two_resets():
    """Cut, reset, cut after one step, reset, terminated after one step: worked by hand."""
    data = hand_made(
        reward=[0, 1, 77, 2, 88, 3],
        discount=[1, 1, 1, 1, 1, 0],
        valid=[1, 1, 0, 1, 0, 1],
        values=[10, 20, 30, 40, 50, 60],
    )
    # 1 + 0.9 * 20, reset, 2 + 0.9 * 40, reset, 3.
    np.testing.assert_allclose(call("lambda_returns", data, 0.95)[:, 0], [19, 20, 38, 40, 3], rtol=1e-6)
    np.testing.assert_allclose(call("gae", data, 0.95)[:, 0], [9, 0, 8, 0, -47], rtol=1e-6)
    np.testing.assert_allclose(call("n_step_returns", data, 2)[:, 0], [19, 20, 38, 40, 3], rtol=1e-6)


@pytest.mark.parametrize("log_rho", [1e4, np.nan])
@pytest.mark.parametrize("where", [1, 4, 8])
def test_a_reset_hides_whatever_stands_in_its_place(where, log_rho):
    """Reward, discount and importance weight of a reset are noise, even infinite or not a number."""
    data = random_data(0, 8, 4, next_step=True, end_probability=0.0)
    timestep = data.timestep
    timestep.valid[where], timestep.first[where] = False, True
    clean = [call("gae", data, 0.9), *call("vtrace", data, with_rho=True), call("lambda_returns", data, 0.9)]
    timestep.reward[where], timestep.discount[where] = np.nan, np.inf
    data.log_rho[where - 1] = log_rho
    dirty = [call("gae", data, 0.9), *call("vtrace", data, with_rho=True), call("lambda_returns", data, 0.9)]
    for one, other in zip(clean, dirty, strict=True):
        assert np.all(np.isfinite(one))
        np.testing.assert_array_equal(one, other)


def test_reward_scale_multiplies_real_rewards_and_leaves_resets_alone():
    """Scaling inside `transitions` is scaling the rewards before."""
    data = random_data(3, 9, 4, next_step=True)
    scaled = data._replace(timestep=data.timestep._replace(reward=data.timestep.reward * np.float32(0.25)))
    step = returns.transitions(jax.tree.map(jnp.asarray, data.timestep), jnp.asarray(data.values), GAMMA, 0.25)
    np.testing.assert_allclose(returns.gae(step, 0.9), call("gae", scaled, 0.9), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("lambda_", [0, 1])
def test_lambda_may_be_a_python_integer(lambda_):
    """Configs accept 0 and 1 as well as 0.0 and 1.0."""
    data = random_data(3, 5, 4, next_step=True)
    step = returns.transitions(jax.tree.map(jnp.asarray, data.timestep), jnp.asarray(data.values), GAMMA)
    log_rho = jnp.asarray(data.log_rho, jnp.float32)
    # Not through `run`, whose cache takes 1 and 1.0 for the same.
    for function in (returns.gae, returns.lambda_returns, lambda step, each: returns.vtrace(step, log_rho, each)):
        jax.tree.map(np.testing.assert_array_equal, function(step, lambda_), function(step, float(lambda_)))
