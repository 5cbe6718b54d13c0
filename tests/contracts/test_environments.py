"""What holds for every environment: specs, ends, resets, keys. A new environment is one more line in `MAKERS`."""

import functools
import textwrap
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import envs
from podracer.envs import Batch, api
from podracer.errors import UserError
from tests.envs.scripted import Scripted

BATCH, STEPS = 3, 24

USER_FILE = """
    import dataclasses
    import jax.numpy as jnp
    from podracer.envs import api

    @dataclasses.dataclass(frozen=True)
    class Count:
        limit: int = 4

        @property
        def spec(self):
            return api.Spec("count", {"seen": api.Array((1,))}, api.Discrete(2), truncates=True)

        def reset(self, key):
            start = key[0] % 5 * 1.0 if key.ndim else 0.0
            return {"at": start, "time": 0}, {"seen": jnp.array([start])}

        def step(self, state, action, key):
            state = {"at": state["at"] + action, "time": state["time"] + 1}
            late = state["time"] >= self.limit
            return state, api.Step({"seen": state["at"][None]}, 1.0, False, late)
"""


def from_a_user_file():
    import tempfile
    from pathlib import Path

    path = Path(tempfile.mkdtemp()) / "count.py"
    path.write_text(textwrap.dedent(USER_FILE))
    return envs.make(f"{path}:Count", limit=3)


def craftax_with_small_textures():
    """Only those that drawings take: craftax makes all sizes at once, pixel by pixel, which takes a minute."""
    from craftax.craftax_classic import constants, renderer

    renderer.load_all_textures = lambda: {16: constants.load_all_textures_given_size(16)}
    return envs.make("craftax/Craftax-Classic-Symbolic-v1", max_timesteps=5)


MAKERS = {
    "catch": lambda: envs.make("catch", rows=5),
    "gridworld": lambda: envs.make("gridworld", max_steps=6),
    "cartpole": lambda: envs.make("cartpole", max_steps=9),
    "cartpole-masked": lambda: envs.make("cartpole-masked", max_steps=9),
    "memory-chain": lambda: envs.make("memory-chain", length=3),
    "scripted": Scripted,
    "user-file": from_a_user_file,
    "time-limit": lambda: envs.TimeLimit(envs.Catch(rows=6), 3),
    "gymnax/CartPole-v1": lambda: envs.make("gymnax/CartPole-v1", max_steps_in_episode=9),
    "gymnax/Pendulum-v1": lambda: envs.make("gymnax/Pendulum-v1", max_steps_in_episode=5),
    "minatar/Breakout": lambda: envs.make("minatar/Breakout"),
    "brax/fast": lambda: envs.make("brax/fast", episode_length=5),
    "jumanji/SlidingTilePuzzle-v0": lambda: envs.make("jumanji/SlidingTilePuzzle-v0", time_limit=5),
    "jumanji/TSP-v1": lambda: envs.make("jumanji/TSP-v1", truncates=False),
    "navix/Navix-DoorKey-Random-5x5-v0": lambda: envs.make("navix/Navix-DoorKey-Random-5x5-v0", max_steps=6),
    "navix/Navix-Dynamic-Obstacles-5x5-v0": lambda: envs.make(
        "navix/Navix-Dynamic-Obstacles-5x5-v0", observation="rgb_first_person", max_steps=9
    ),
    "xminigrid/MiniGrid-EmptyRandom-5x5": lambda: envs.make("xminigrid/MiniGrid-EmptyRandom-5x5", max_steps=6),
    "craftax/Craftax-Classic-Symbolic-v1": craftax_with_small_textures,
    "pgx/tic_tac_toe": lambda: envs.make("pgx/tic_tac_toe"),
    "pgx/tic_tac_toe-self": lambda: envs.make("pgx/tic_tac_toe", opponent="self"),
    "pgx/connect_four-self": lambda: envs.make("pgx/connect_four", opponent="self"),
    "pgx/connect_four-with-state": lambda: envs.with_state(envs.make("pgx/connect_four")),
    "pgx/2048": lambda: envs.make("pgx/2048"),
}
# Their first episodes all begin alike.
ONE_START = {"brax/fast", "pgx/tic_tac_toe-self", "pgx/connect_four-self"}


def draw_actions(spec, observation, key):
    """[B, ...] legal actions in the agent's units."""
    if isinstance(spec.action, api.Discrete):
        size = jax.tree.leaves(observation)[0].shape[0]
        mask = observation.get("action_mask") if isinstance(observation, dict) else None
        mask = jnp.ones((size, spec.action.num_values), bool) if mask is None else mask
        return jax.random.categorical(key, jnp.where(mask, 0.0, -jnp.inf)).astype(jnp.int32)
    size = jax.tree.leaves(observation)[0].shape[0]
    return jax.random.uniform(key, (size, spec.action.size), minval=-1.0, maxval=1.0)


@functools.cache
def rolled(name):
    """One roll-out of the batch and the functions that made it; everything below looks at it."""
    env = MAKERS[name]()
    batch = Batch(env)
    init, step = jax.jit(batch.init), jax.jit(batch.step)
    draw = jax.jit(functools.partial(draw_actions, env.spec))

    def run(seed):
        keys = jax.random.split(jax.random.PRNGKey(seed), (STEPS + 1, BATCH))
        state, timestep = init(keys[0])
        states, timesteps, actions = [state], [timestep], []
        for t in range(STEPS):
            actions.append(draw(timestep.observation, jax.random.fold_in(jax.random.PRNGKey(seed), t)))
            state, timestep = step(state, actions[-1], keys[t + 1])
            states.append(state)
            timesteps.append(timestep)
        stack = lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves])
        return types.SimpleNamespace(
            keys=keys,
            states=states,
            actions=actions,
            timesteps=jax.tree.map(stack, *timesteps),
        )

    out = run(0)
    return types.SimpleNamespace(
        env=env, batch=batch, init=init, step=step, run=run, compiled=step._cache_size(), first=out
    )


@pytest.fixture(params=MAKERS)
def roll(request):
    family, slash, _ = request.param.partition("/")
    if slash:
        pytest.importorskip("gymnax" if family == "minatar" else family)
    return rolled(request.param)


def test_the_spec_says_what_comes(roll):
    spec, timesteps = roll.env.spec, roll.first.timesteps
    assert jax.tree.structure(timesteps.observation) == jax.tree.structure(
        spec.observation, is_leaf=lambda leaf: isinstance(leaf, api.Array)
    )
    for leaf, wanted in zip(
        jax.tree.leaves(timesteps.observation),
        jax.tree.leaves(spec.observation, is_leaf=lambda leaf: isinstance(leaf, api.Array)),
        strict=True,
    ):
        assert leaf.shape == (STEPS + 1, BATCH, *wanted.shape)
        assert leaf.dtype == np.dtype(wanted.dtype)
        # A state beside the observation is as the environment has it: nobody learns from it.
        assert spec.model is not None or leaf.dtype in (np.float32, np.bool_, np.uint8)
        assert np.isfinite(leaf).all()
    mask = timesteps.observation.get("action_mask") if isinstance(timesteps.observation, dict) else None
    if mask is not None:
        assert mask.dtype == np.bool_ and mask.any(-1).all()
        assert mask.shape[2:] == (spec.action.num_values,)


def test_one_environment_has_the_types_of_the_batch(roll):
    key = jax.random.PRNGKey(0)
    state, observation = jax.eval_shape(roll.env.reset, key)
    action = jax.tree.map(lambda leaf: leaf[0], roll.first.actions[0])
    after, out = jax.eval_shape(roll.env.step, state, action, key)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    shapes = lambda tree: [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]
    assert shapes(after) == shapes(state)
    assert shapes(api.Step(*out).observation) == shapes(observation)
    assert len(out) == 4


def test_time_steps_are_well_formed(roll):
    t = roll.first.timesteps
    assert t.reward.dtype == t.discount.dtype == np.float32
    assert t.first[0].all() and not t.valid[0].any()
    assert np.isin(t.discount, (0.0, 1.0)).all()
    if roll.batch.next_step:
        # A reset is never a transition, and follows an end only.
        assert (t.first[1:] == ~t.valid[1:]).all()
        assert (t.reward[t.first] == 0).all() and (t.discount[t.first] == 1).all()
        assert t.first[1:][t.discount[:-1] == 0].all()
    else:
        assert t.valid[1:].all()
        assert (t.first[1:] == (t.discount[1:] == 0)).all()


def test_returns_equal_a_loop_over_the_raw_environment(roll):
    """Environment 0, followed by hand: what it earned, where it ended, what was seen, start states included."""
    env, t = roll.env, roll.first.timesteps
    reset, step = jax.jit(env.reset), jax.jit(env.step)
    from podracer.envs.batch import to_environment

    keys = roll.first.keys[:, 0]
    state, observation = reset(keys[0])
    over = False
    for k in range(1, STEPS + 1):
        restart = over and roll.batch.next_step
        if not restart:
            action = to_environment(env.spec.action, roll.first.actions[k - 1][0])
            state, out = step(state, action, keys[k])
            out = api.Step(*out)
            observation, over = out.observation, bool(out.terminated) or bool(out.truncated)
            assert not (bool(out.terminated) and bool(out.truncated))
            assert env.spec.truncates or not bool(out.truncated)
            np.testing.assert_allclose(t.reward[k, 0], np.asarray(out.reward, np.float32), rtol=1e-4, atol=1e-5)
            assert t.discount[k, 0] == (0.0 if out.terminated else 1.0)
            restart = over and not roll.batch.next_step
        if restart:
            state, observation = reset(jax.random.fold_in(keys[k], 1))
            over = False
        assert t.first[k, 0] == restart
        for got, wanted in zip(jax.tree.leaves(t.observation), jax.tree.leaves(observation), strict=True):
            np.testing.assert_allclose(got[k, 0], np.asarray(wanted), rtol=1e-4, atol=1e-5)


def test_nothing_leaks_from_one_episode_into_the_next(roll):
    """The state after a reset is the state that the same key gives to a new environment."""
    reset = jax.jit(roll.env.reset)
    found = np.argwhere(roll.first.timesteps.first[1:])
    assert len(found) or roll.env.spec.name == "pgx/2048"  # whose episodes are long
    for k, b in found[:2]:
        fresh, _ = reset(jax.random.fold_in(roll.first.keys[k + 1, b], 1))
        here = jax.tree.map(lambda leaf, b=b: leaf[b], roll.first.states[k + 1].env)
        for got, wanted in zip(jax.tree.leaves(here), jax.tree.leaves(fresh), strict=True):
            np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=1e-5, atol=1e-6)


def test_the_same_keys_give_the_same_trajectory_and_others_other_starts(roll, request):
    again = roll.run(0).timesteps
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, roll.first.timesteps, again)))
    name = request.node.callspec.params["roll"]
    keys = jax.random.split(jax.random.PRNGKey(7), BATCH)
    for seed in range(8, 14):
        other = jax.random.split(jax.random.PRNGKey(seed), BATCH)
        same = jax.tree.map(
            lambda a, b: np.array_equal(np.asarray(a), np.asarray(b)),
            roll.init(keys)[1].observation,
            roll.init(other)[1].observation,
        )
        if not all(jax.tree.leaves(same)):
            break
    else:
        assert name in ONE_START


def test_steps_compile_once(roll):
    assert roll.compiled == 1


def test_environments_are_static_arguments(roll):
    assert isinstance(hash(roll.env), int)


def test_drawings_are_pictures(roll):
    if not hasattr(roll.env, "render"):
        pytest.skip("cannot be drawn")
    state = jax.tree.map(lambda leaf: leaf[0], roll.first.states[3].env)
    try:
        image = roll.env.render(state)
    except UserError as error:
        pytest.skip(str(error))
    assert isinstance(image, np.ndarray) and image.dtype == np.uint8
    assert image.ndim == 3 and image.shape[2] == 3 and image.std() > 0
