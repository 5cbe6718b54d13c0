"""Environments whose observation carries their state: through resets, the host, and back."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import envs, specs
from podracer.envs import Batch, api
from podracer.envs.batch import TimeLimit
from podracer.errors import UserError
from podracer.evaluate import Evaluator, HostEvaluator


@dataclasses.dataclass(frozen=True)
class Keyed:
    """Its state has a typed key and a number; the observation is no dict."""

    @property
    def spec(self):
        return api.Spec("keyed", api.Array(()), api.Discrete(2))

    def reset(self, key):
        return {"key": key, "at": jnp.zeros(())}, jnp.zeros(())

    def step(self, state, action, key):
        state = {"key": jax.random.split(state["key"])[0], "at": state["at"] + action}
        return state, api.Step(state["at"], 1.0, state["at"] > 2, False)


def test_the_state_in_an_observation_is_the_environments_after_resets_too():
    """Each episode ends after at most nine moves: stale ends would make the search start from a finished game."""
    env = envs.with_state(envs.make("pgx/tic_tac_toe"))
    batch = Batch(env)
    state, timestep = batch.init(jax.random.split(jax.random.key(0), 4))
    step, state_of = jax.jit(batch.step), jax.vmap(env.state_of)
    resets = 0
    for number in range(25):
        now = state_of(timestep.observation)
        jax.tree.map(np.testing.assert_array_equal, now, state.env)
        assert not np.any(now.game.terminated)
        fresh = np.asarray(timestep.first)
        assert np.all(np.asarray(now.game._step_count)[fresh] == 0)
        resets += int(fresh.sum()) if number else 0
        keys = jax.random.split(jax.random.key(number), 4)
        action = jnp.argmax(timestep.observation["action_mask"], -1).astype(jnp.int32)
        state, timestep = step(state, action, keys)
    assert resets >= 8


def test_features_and_memories_leave_the_state_out():
    env = envs.WithState(Keyed())
    _, seen = env.reset(jax.random.key(1))
    assert set(seen) == {"observation", specs.STATE}
    assert specs.features(seen).shape == () and specs.without_state(seen) == {"observation": seen["observation"]}
    assert specs.features(env.spec.observation) == api.Array(())
    game = envs.with_state(envs.make("pgx/tic_tac_toe")).spec
    assert set(specs.without_state(game.observation)) == {"observation", "action_mask"}
    assert specs.features(game.observation).shape == (3, 3, 2)


def test_typed_keys_come_back_typed():
    env = envs.WithState(Keyed())
    state, seen = env.reset(jax.random.key(1))
    assert all(not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in jax.tree.leaves(seen))
    again = env.state_of(seen)
    np.testing.assert_array_equal(jax.random.key_data(again["key"]), jax.random.key_data(state["key"]))
    one, other = (env.step(each, 1, jax.random.key(2))[1].observation for each in (state, again))
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_the_host_changes_nothing():
    """The same states in numpy."""
    env = envs.with_state(envs.make("pgx/connect_four"))
    batch = envs.on_host(env, 2).start([3, 4])
    seen = batch.reset().timestep.observation
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(seen))
    after = batch.step(np.array([3, 3], np.int32)).timestep.observation
    step = jax.vmap(lambda seen, key: env.step(env.state_of(seen), 3, key)[1].observation)
    wanted = step(seen, jax.random.split(jax.random.key(0), 2))
    jax.tree.map(np.testing.assert_array_equal, after, wanted)
    batch.close()


def test_self_play_is_measured_against_an_opponent():
    """However it is wrapped; other environments stay as they are."""
    game = envs.with_state(envs.make("pgx/tic_tac_toe"))
    assert game.env.opponent == "self" and game.spec.alternating
    wanted = envs.WithState(envs.Pgx("tic_tac_toe", "random"))
    assert envs.for_evaluation(game) == wanted
    assert envs.for_evaluation(Batch(game)) == Batch(wanted)
    assert envs.for_evaluation(TimeLimit(game, 5)) == TimeLimit(wanted, 5)
    assert envs.for_evaluation(envs.on_host(game, 3)) == envs.on_host(wanted, 3)
    for plain in (envs.Catch(), envs.Pgx("tic_tac_toe"), envs.WithState(envs.Catch())):
        assert envs.for_evaluation(plain) == plain

    from podracer import agents

    agent = agents.a2c(envs.Pgx("tic_tac_toe", "self").spec)
    assert Evaluator(agent, envs.Pgx("tic_tac_toe", "self")).batch.env == wanted.env
    assert HostEvaluator(agent, envs.on_host(envs.Pgx("tic_tac_toe", "self"), 3), 5).env == envs.on_host(wanted.env, 5)


def test_environments_on_the_host_have_no_state_to_see():
    with pytest.raises(UserError, match=r"CartPole-v1 runs on the host; expected .*Choose muzero"):
        envs.with_state(envs.make("gymnasium/CartPole-v1"))
