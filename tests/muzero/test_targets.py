"""Targets against a loop over single environments that walks forward through time, in both reset modes."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muzero.targets import Window, at, fate, targets, value_targets
from podracer.types import TimeStep
from tests.contracts.agents import fast_jit

A = 3


def stories(length, batch_size, seed, next_step):
    """Flags of time steps [length + 1, batch_size], as `podracer.envs.batch` gives them, with ends everywhere."""
    rng = np.random.default_rng(seed)
    shape = (length + 1, batch_size)
    reward, discount = rng.normal(size=shape), np.ones(shape)
    first, valid = np.zeros(shape, bool), np.ones(shape, bool)
    for b in range(batch_size):
        often = [0.0, 0.15, 0.4, 0.8][b % 4]
        begun = rng.random() < 0.3
        first[0, b], valid[0, b] = begun, not begun or not next_step
        over = False
        if next_step and not begun and rng.random() < 0.3:  # the window starts on a final observation
            discount[0, b], over = float(rng.random() < 0.5), True
        if not next_step and begun:
            discount[0, b] = 0
        for t in range(1, length + 1):
            if over:
                first[t, b], valid[t, b], reward[t, b], over = True, False, 0.0, False
            elif rng.random() < often:
                discount[t, b] = float(next_step and rng.random() < 0.5)
                over, first[t, b] = next_step, not next_step
    numbers = (each.astype(np.float32) for each in (reward, discount))
    return TimeStep((), *numbers, first, valid)


def walk_value(story, value, p, b, gamma, n, mix):
    """The target of position p: follow the episode, stop at its end or the window's."""
    length = value.shape[0]
    ways, total, scale, q = [], 0.0, 1.0, p
    while True:
        steps = q - p
        ignored = not story.valid[q + 1, b]
        unknown = q == length - 1 and story.discount[q + 1, b] != 0  # nobody searched after the last decision
        if ignored or unknown or steps == n:
            ways.append(total + scale * value[q, b])
            break
        if steps:
            ways.append(total + scale * value[q, b])
        total += scale * story.reward[q + 1, b]
        scale *= gamma * story.discount[q + 1, b]
        q += 1
        if scale == 0:
            ways.append(total)
            break
    if mix == 1 or len(ways) == 1:
        return ways[-1]
    weights = [(1 - mix) * mix**i for i in range(len(ways) - 1)] + [mix ** (len(ways) - 1)]
    return float(np.dot(weights, ways))


def walk(story, value, policy, action, random, s, b, K, gamma, n, mix):
    """`(value, policy, reward, action, masks)` of one unroll, by walking along it."""
    state = "alive"
    if story.discount[s, b] == 0 and story.valid[s, b] and not story.first[s, b]:
        state = "absorbed"
    elif not story.valid[s + 1, b]:
        state = "cut"
    rows = []
    for k in range(K + 1):
        p = s + k
        row = {"value_mask": state != "cut", "policy_mask": state == "alive"}
        row["value"] = walk_value(story, value, p, b, gamma, n, mix) if state == "alive" else 0.0
        row["policy"] = policy[p, b] if state == "alive" else None
        if k < K:
            row["reward_mask"] = state != "cut"
            row["reward"] = story.reward[p + 1, b] if state == "alive" else 0.0
            row["action"] = action[p, b] if state == "alive" else random[k, b]
        rows.append(row)
        if k < K and state == "alive":
            if story.discount[p + 1, b] == 0:
                state = "absorbed"
            elif p + 1 == value.shape[0] or not story.valid[p + 2, b]:
                state = "cut"
    return rows


@pytest.mark.parametrize("next_step", [True, False], ids=["next-step", "same-step"])
@pytest.mark.parametrize(("gamma", "n", "mix"), [(0.9, 3, 1.0), (-0.9, 2, 1.0), (0.97, 50, 0.8), (1.0, 4, 0.5)])
def test_targets_are_those_of_a_walk(next_step, gamma, n, mix):
    length, batch_size, K = 12, 64, 4
    compiled = fast_jit(
        lambda story, action, policy, value, start, random: targets(
            Window(story, action, policy, value, start), K, gamma, n, mix, random
        )
    )
    seen = set()
    for seed in range(4):
        rng = np.random.default_rng(100 + seed)
        story = stories(length, batch_size, seed, next_step)
        value = rng.normal(size=(length, batch_size)).astype(np.float32)
        policy = rng.dirichlet(np.ones(A), (length, batch_size)).astype(np.float32)
        action, random = (rng.integers(0, 99, (steps, batch_size)).astype(np.int32) for steps in (length, K))
        start = rng.integers(0, length - K + 1, batch_size).astype(np.int32)
        found = jax.device_get(compiled(story, action, policy, value, start, random))
        for b in range(batch_size):
            rows = walk(story, value, policy, action, random, int(start[b]), b, K, gamma, n, mix)
            for k, row in enumerate(rows):
                for name in ("value_mask", "policy_mask", "reward_mask"):
                    if name in row:
                        assert getattr(found, name)[k, b] == row[name], (seed, b, k, name)
                if row["value_mask"]:
                    np.testing.assert_allclose(found.value[k, b], row["value"], rtol=1e-4, atol=1e-5)
                if row["policy_mask"]:
                    np.testing.assert_array_equal(found.policy[k, b], row["policy"])
                if row.get("reward_mask"):
                    assert found.reward[k, b] == pytest.approx(row["reward"])
                    if rows[k]["policy_mask"]:
                        assert found.action[k, b] == row["action"]
                    else:
                        assert found.action[k, b] == random[k, b]
            masks = tuple((row["value_mask"], row["policy_mask"]) for row in rows)
            seen |= {masks[0], *itertools.pairwise(masks)}
    alive, absorbed, cut = (True, True), (True, False), (False, False)
    assert {alive, (alive, alive), (alive, absorbed), (absorbed, absorbed)} <= seen
    # Starts on final observations are of next-step mode; elsewhere the window's end alone cuts.
    assert all((each in seen) == next_step for each in (absorbed, cut, (cut, cut))) and (alive, cut) in seen


def test_an_end_at_the_very_first_and_at_the_very_last_decision():
    """By hand: K = 2, n = 2, gamma 1/2; the first decision ends an episode, and the last one of the window does."""
    flags = lambda *values: np.array(values)[:, None]
    story = TimeStep(
        (),
        flags(0.0, 1.0, 0.0, 4.0, 8.0).astype(np.float32),
        flags(1.0, 0.0, 1.0, 1.0, 0.0).astype(np.float32),
        flags(True, False, True, False, False),
        flags(False, True, False, True, True),
    )
    value = flags(10.0, 20.0, 30.0, 40.0).astype(np.float32)
    # Position 0: reward 1, the end. Position 1: terminal. Position 2: 4 + 8/2, the end. Position 3: 8, the end.
    found = value_targets(jax.tree.map(jnp.asarray, story), jnp.asarray(value), 0.5, 2, 1.0)
    np.testing.assert_allclose(found[:, 0], [1.0, 20.0, 8.0, 8.0])
    for start, absorbed in ((0, [False, True, True]), (1, [True, True, True]), (2, [False, False, True])):
        absorbed_found, cut = fate(jax.tree.map(jnp.asarray, story), jnp.array([start]), 2)
        assert absorbed_found[:, 0].tolist() == absorbed and not cut.any()
    # Had the last decision not ended it: its own value, from which the one before bootstraps, and no known state after.
    story = story._replace(discount=np.where(np.arange(5)[:, None] == 4, np.float32(1), story.discount))
    found = value_targets(jax.tree.map(jnp.asarray, story), jnp.asarray(value), 0.5, 2, 1.0)
    np.testing.assert_allclose(found[:, 0], [1.0, 20.0, 24.0, 40.0])
    absorbed_found, cut = fate(jax.tree.map(jnp.asarray, story), jnp.array([2]), 2)
    assert not absorbed_found.any() and cut[:, 0].tolist() == [False, False, True]


def test_a_truncated_episode_bootstraps_from_its_final_observation():
    flags = lambda *values: np.array(values)[:, None]
    story = TimeStep(
        (),
        flags(0.0, 1.0, 0.0, 4.0, 8.0).astype(np.float32),
        flags(1.0, 1.0, 1.0, 1.0, 1.0).astype(np.float32),
        flags(True, False, True, False, False),
        flags(False, True, False, True, True),
    )
    value = flags(10.0, 20.0, 30.0, 40.0).astype(np.float32)
    found = value_targets(jax.tree.map(jnp.asarray, story), jnp.asarray(value), 0.5, 3, 1.0)
    np.testing.assert_allclose(found[0, 0], 1.0 + 0.5 * 20.0)
    absorbed, cut = fate(jax.tree.map(jnp.asarray, story), jnp.array([0]), 2)
    assert not absorbed.any() and cut[:, 0].tolist() == [False, True, True]


@functools.cache
def nim_value(stones):
    """A pile of which the players take 1 or 2 in turn; who takes the last one wins. Value to the player to move."""
    if stones == 0:
        return -1.0
    return max(1.0 if take == stones else -nim_value(stones - take) for take in (1, 2) if take <= stones)


def test_two_players_with_a_discount_of_minus_1_learn_the_game_theoretic_values():
    """Perfect play from every pile, with values from perfect search: the targets are the minimax values, for any n."""
    length = 6
    for stones, n in itertools.product(range(1, 12), (1, 2, 3, 6)):
        pile, piles, rewards, ends = stones, [], [], []
        for _ in range(length + 1):
            piles.append(pile)
            take = max((t for t in (1, 2) if t <= pile), key=lambda t: 1.0 if t == pile else -nim_value(pile - t))
            pile -= take
            rewards.append(float(pile == 0))
            ends.append(pile == 0)
            pile = pile or stones  # same-step: the next game
        column = lambda values, kind: jnp.asarray(np.array(values), kind)[:, None]
        story = TimeStep(
            (),
            column([0.0, *rewards[:length]], jnp.float32),
            1.0 - column([False, *ends[:length]], jnp.float32),
            column([True, *ends[:length]], bool),
            column([True] * (length + 1), bool),
        )
        value = column([nim_value(each) for each in piles[:length]], jnp.float32)
        found = value_targets(story, value, -1.0, n, 1.0)
        np.testing.assert_allclose(found, value, err_msg=f"{stones} stones, n = {n}")
    assert {nim_value(each) for each in range(1, 12)} == {1.0, -1.0}


def test_windows_are_cut_per_sequence():
    sequence = jnp.arange(24).reshape(8, 3)
    found = at({"a": sequence}, jnp.array([0, 2, 5]), 3)["a"]
    np.testing.assert_array_equal(found, np.stack([sequence[0:3, 0], sequence[2:5, 1], sequence[5:8, 2]], 1))
