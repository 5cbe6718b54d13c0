"""What holds for every host environment: specs, flags, scores, seeds, arrays. A new one is a line in `MAKERS`."""

from __future__ import annotations

import functools
import importlib.util

import jax
import numpy as np
import pytest

from podracer import envs
from podracer.envs import api
from podracer.errors import UserError
from tests.envs.scripted import Scripted

STEPS, SEEDS = 40, (7, 1234, 2**30 + 5)
GYM = "gymnasium/tests.envs.scripted_gymnasium:Podracer"
MAKERS = {
    "bridge, same-step": lambda: envs.Catch(rows=5),
    "bridge, next-step": Scripted,
    "envpool/CartPole-v1": lambda: envs.make("envpool/CartPole-v1", num_threads=1),
    "atari/Breakout, machado": lambda: envs.make("atari/Breakout", num_threads=1, max_episode_frames=60),
    "atari/Breakout, classic": lambda: envs.make(
        "atari/Breakout", protocol="classic", num_threads=1, max_episode_frames=120, image_size=40
    ),
    "ale/Breakout, classic": lambda: envs.make(
        "ale/Breakout", protocol="classic", num_threads=1, max_episode_frames=120, image_size=40
    ),
    "gymnasium/CartPole-v1": lambda: envs.make("gymnasium/CartPole-v1", max_episode_steps=9),
    "gymnasium, scripted": lambda: envs.make(f"{GYM}Scripted-v0"),
    "gymnasium, composed": lambda: envs.make(f"{GYM}Composed-v0"),
}
NEEDS = {"atari": "envpool", "envpool": "envpool", "ale": "ale_py", "gymnasium": "gymnasium"}


@functools.cache
def recipe(name, batch_size):
    package = NEEDS.get(name.partition("/")[0].partition(",")[0])
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    return envs.on_host(MAKERS[name](), batch_size)


def actions(spec, seeds):
    """[STEPS, B, ...], those of an environment drawn from its seed."""
    sizes = [spec.action.num_values] if isinstance(spec.action, api.Discrete) else list(spec.action.num_values)

    def one(seed):
        drawn = np.random.default_rng(seed).integers(0, sizes, (STEPS, len(sizes))).astype(np.int32)
        return drawn[:, 0] if isinstance(spec.action, api.Discrete) else drawn

    return np.stack([one(seed) for seed in seeds], 1)


def play(env, seeds):
    """All steps, and copies of them made at once."""
    batch = env.start(list(seeds))
    try:
        steps = [batch.reset()]
        copies = [jax.tree.map(np.array, steps[0])]
        for action in actions(env.spec, seeds):
            steps.append(batch.step(action))
            copies.append(jax.tree.map(np.array, steps[-1]))
    finally:
        batch.close()
    return steps, copies


@functools.cache
def played(name):
    return play(recipe(name, len(SEEDS)), SEEDS)


def stacked(name):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *played(name)[0])


@pytest.mark.parametrize("name", list(MAKERS))
def test_observations_are_as_the_spec_says_and_flags_have_their_types(name):
    spec = recipe(name, len(SEEDS)).spec
    for step in played(name)[0]:
        wanted = jax.tree.map(lambda leaf: (len(SEEDS), *leaf.shape, np.dtype(leaf.dtype)), spec.observation)
        got = jax.tree.map(lambda leaf: (*leaf.shape, leaf.dtype), step.timestep.observation)
        assert got == wanted
        kinds = [(leaf.shape, leaf.dtype.name) for leaf in (*step.timestep[1:], *step[1:])]
        assert kinds == [((3,), kind) for kind in ("float32", "float32", "bool", "bool", "float32", "bool")]


@pytest.mark.parametrize("name", list(MAKERS))
def test_the_first_step_is_a_reset_and_earns_nothing(name):
    step = played(name)[0][0]
    timestep = step.timestep
    assert timestep.first.all() and not timestep.valid.any() and (timestep.discount == 1).all()
    assert not timestep.reward.any() and not step.score.any() and not step.game_over.any()


@pytest.mark.parametrize("name", list(MAKERS))
def test_ends_are_followed_by_exactly_one_reset(name):
    """Or are one themselves, where the game goes on at once; a reset earns nothing and ends nothing."""
    steps = stacked(name)
    first, valid = steps.timestep.first, steps.timestep.valid
    over, discount = steps.game_over, steps.timestep.discount
    assert set(np.unique(discount)) <= {0.0, 1.0}
    reset = ~valid
    assert first[reset].all() and (discount[reset] == 1).all() and not over[reset].any()
    assert not steps.score[reset].any() and not steps.timestep.reward[reset].any()
    ended = (over | (discount == 0)) & ~first
    assert (reset[1:] == ended[:-1]).all()
    assert over.any(), "no game ended: the checks above saw nothing"
    spec = recipe(name, len(SEEDS)).spec
    assert spec.truncates or (discount[over] == 0).all()


@pytest.mark.parametrize("name", list(MAKERS))
def test_what_was_returned_is_never_written_to_again(name):
    for step, copy in zip(*played(name), strict=True):
        jax.tree.map(np.testing.assert_array_equal, step, copy)


@pytest.mark.parametrize("name", list(MAKERS))
def test_an_environment_follows_from_its_own_seed_and_actions(name):
    """Whatever runs beside it: in batches of one, and in another order."""
    steps = stacked(name)
    for i in range(2):
        alone, _ = play(recipe(name, 1), SEEDS[i : i + 1])
        for step, whole in zip(alone, played(name)[0], strict=True):
            jax.tree.map(lambda a, b, i=i: np.testing.assert_array_equal(a[0], b[i]), step, whole)
    differ = [
        np.any(leaf[:, 0] != leaf[:, other]) for leaf in jax.tree.leaves(steps.timestep.observation) for other in (1, 2)
    ]
    assert any(differ), "three seeds, one game"


@pytest.mark.parametrize("name", list(MAKERS))
def test_as_many_seeds_as_environments(name):
    with pytest.raises(UserError, match="2 seeds for 3 environments; expected as many"):
        recipe(name, 3).start([1, 2])


@pytest.mark.parametrize("name", list(MAKERS))
def test_recipes_are_hashable_and_closing_twice_does_no_harm(name):
    env = recipe(name, 1)
    assert hash(env) == hash(envs.on_host(env, 1)) and env != envs.on_host(env, 2)
    batch = env.start([1])
    batch.reset()
    batch.close()
    batch.close()
