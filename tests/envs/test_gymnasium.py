"""The Gymnasium adapter: resets are masked, ends told apart, arrays stay as they are, no process is left behind."""

from __future__ import annotations

import multiprocessing
import sys

import numpy as np
import pytest

from podracer import envs
from podracer.envs import api
from podracer.errors import UserError

pytest.importorskip("gymnasium")
MODULE = "tests.envs.scripted_gymnasium"
SCRIPT = ((3, False), (1, True), (5, True), (1, False), (2, False))


def make(name, batch_size=1, **options):
    return envs.on_host(envs.make(f"gymnasium/{MODULE}:Podracer{name}-v0", **options), batch_size)


def play(env, seeds, actions):
    """All steps of a batch, reset first."""
    batch = env.start(seeds)
    steps = [batch.reset(), *(batch.step(action) for action in actions)]
    batch.close()
    return steps


def expected(seed, actions):
    """A numpy account of one scripted environment: observation, reward, discount, first, valid, game over."""
    rows, episode, step, over = [((seed, 0, 0), 0.0, 1.0, True, False, False)], 0, 0, False
    for action in actions:
        if over:
            episode, step, over = episode + 1, 0, False
            rows.append(((seed, episode, 0), 0.0, 1.0, True, False, False))
            continue
        step += 1
        length, cut = SCRIPT[(seed + episode) % len(SCRIPT)]
        over = step >= length
        discount = 0.0 if over and not cut else 1.0
        rows.append(((seed, episode, step), 10.0 * episode + step + action / 8, discount, False, True, over))
    return rows


@pytest.mark.parametrize(
    "vectorization, batch_size", [("sync", 1), ("sync", 7), pytest.param("async", 2, marks=pytest.mark.slow)]
)
def test_every_step_against_a_numpy_account(vectorization, batch_size):
    """Resets are first and invalid, a truncated episode keeps its value, actions count from the space's start."""
    rng = np.random.default_rng(0)
    actions = rng.integers(0, 4, (40, batch_size)).astype(np.int32)
    seeds = [11 * i + 3 for i in range(batch_size)]
    steps = play(make("Scripted", batch_size, vectorization=vectorization), seeds, actions)
    for i, seed in enumerate(seeds):
        for step, row in zip(steps, expected(seed, actions[:, i]), strict=True):
            observation, reward, discount, first, valid, over = row
            timestep = step.timestep
            assert timestep.observation[i].tolist() == list(observation)
            assert timestep.reward[i] == reward == step.score[i] and timestep.discount[i] == discount
            assert (timestep.first[i], timestep.valid[i], step.game_over[i]) == (first, valid, over)
    assert steps[0].timestep.observation.dtype == np.float32 and steps[1].timestep.reward.dtype == np.float32
    assert not multiprocessing.active_children()


def test_what_was_returned_stays_as_it_was():
    env = make("Composed", 3)
    batch = env.start([0, 1, 2])
    kept = [batch.reset(), *(batch.step(np.zeros((3, 2), np.int32)) for _ in range(3))]
    copies = [step.timestep.observation["picture"].copy() for step in kept]
    for _ in range(5):
        batch.step(np.ones((3, 2), np.int32))
    batch.close()
    assert all(np.array_equal(a.timestep.observation["picture"], b) for a, b in zip(kept, copies, strict=True))


def test_dicts_tuples_and_discrete_observations():
    env = make("Composed", 2)
    assert env.spec.action == api.MultiDiscrete((3, 2))
    assert env.spec.observation == {
        "place": api.Array((5,)),
        "picture": api.Array((4, 4, 3), np.dtype(np.uint8)),
        "both": (api.Array((2,), np.dtype(np.int8)), api.Array((2, 2), np.dtype(np.float32))),
    }
    steps = play(env, [2, 2], [np.array([[0, 0], [2, 1]], np.int32)])
    seen = steps[1].timestep.observation
    assert seen["place"].tolist() == [[0, 1, 0, 0, 0]] * 2 and seen["picture"].dtype == np.uint8
    assert seen["both"][1].shape == (2, 2, 2)
    assert steps[1].score.tolist() == [1 - 1 / 8, 1 + 2 / 8]  # (0 + 0 + 1 - 2) / 8, and (2 + 1 + 1 - 2) / 8


def test_boxes_are_rescaled_and_masks_are_bool():
    env = make("Boxed", 2)
    assert env.spec.action == api.Continuous((0.0, -np.inf), (10.0, np.inf))
    assert env.spec.observation["action_mask"] == api.Array((4,), np.dtype(bool))
    steps = play(env, [0, 1], [np.array([[-1.0, 3.0], [2.0, -0.5]], np.float32)])
    assert steps[1].score.tolist() == [300.0, -40.0]  # 2 is clipped at the bound
    assert steps[1].timestep.observation["action_mask"].tolist() == [[True, False, True, True]] * 2


def test_cartpole_with_a_time_limit():
    env = envs.on_host(envs.make("gymnasium/CartPole-v1", max_episode_steps=5), 4)
    assert env.spec.max_episode_steps == 5 and env.spec.truncates and env.spec.name == "gymnasium/CartPole-v1"
    steps = play(env, [1, 2, 3, 4], [np.full(4, t % 2, np.int32) for t in range(6)])
    assert [step.game_over.all() for step in steps] == [False] * 5 + [True, False]
    assert (steps[5].timestep.discount == 1).all() and steps[6].timestep.first.all()
    assert len(np.unique(steps[0].timestep.observation[:, 0])) == 4
    again = play(env, [1, 2, 3, 4], [np.full(4, t % 2, np.int32) for t in range(6)])
    assert np.array_equal(again[6].timestep.observation, steps[6].timestep.observation)


def test_observations_other_than_said_are_refused():
    name = rf"gymnasium/{MODULE}:PodracerWrong-v0"
    with pytest.raises(UserError, match=rf"{name}: observation has shape \(4,\); expected \(3,\)"):
        _ = make("Wrong").spec
    env = make("Wrong", 2, after=2)
    assert env.spec.observation.shape == (3,)
    with pytest.raises(UserError, match=rf"{name}: an observation is not as its observation_space says, Box.*\(3,\)"):
        play(env, [0, 2], [np.zeros(2, np.int32)] * 4)


def test_a_module_in_the_working_directory_registers_an_environment(tmp_path, monkeypatch):
    (tmp_path / "podracer_test_mine.py").write_text(
        "import gymnasium\n"
        "from tests.envs.scripted_gymnasium import Scripted\n"
        "gymnasium.register('PodracerMine-v0', Scripted)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    env = envs.on_host(envs.make("gymnasium/podracer_test_mine:PodracerMine-v0"), 2)
    assert play(env, [1, 2], [np.zeros(2, np.int32)])[1].score.tolist() == [1.0, 1.0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # Gymnasium's log of the process that fails
def test_a_failing_process_is_reported_and_none_is_left():
    env = make("Wrong", 2, after=2, vectorization="async")
    batch = env.start([0, 2])
    batch.reset()
    with pytest.raises(UserError, match="an observation is not as its observation_space says"):
        for _ in range(4):
            batch.step(np.zeros(2, np.int32))
    batch.close()
    batch.close()
    assert not multiprocessing.active_children()


def test_a_picture_of_the_first_environment():
    batch = make("Scripted", 5).start_drawn(3)
    batch.reset()
    batch.step(np.zeros(1, np.int32))
    assert batch.render().shape == (8, 6, 3) and (batch.render() == 1).all()
    batch.close()


@pytest.mark.parametrize(
    "name, options, says",
    [
        ("gymnasium/CartPol-v1", {}, "unknown gymnasium environment 'CartPol-v1'. Did you mean 'CartPole-v1'"),
        ("gymnasium/no_module:X-v0", {}, "imports no_module, which fails: No module named 'no_module'"),
        ("gymnasium/CartPole-v1", {"vectorization": "asinc"}, "unknown vectorization 'asinc'. Did you mean 'async'"),
        ("gymnasium/CartPole-v1", {"suton": True}, r"does not accept the options \['suton'\]"),
        ("gymnasium/CartPole-v1", {"batch_size": 3}, "batch_size is no option"),
    ],
)
def test_mistakes_are_one_sentence(name, options, says):
    with pytest.raises(UserError, match=says):
        _ = envs.make(name, **options).spec
