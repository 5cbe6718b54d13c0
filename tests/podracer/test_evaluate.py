"""Evaluation: known returns, caps, greedy or not, its own randomness, many params at once."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import envs
from podracer.envs import Batch, api
from podracer.errors import UserError
from podracer.evaluate import Evaluator
from podracer.types import ActorOutput, Agent
from tests.anakin import tiny
from tests.envs import scripted

SCRIPT = ((3, False), (1, True), (5, True), (2, False))


def constant_agent():
    """Its params are the greedy action; a sampled action is 0."""

    def greedy(params, state, timestep, key):
        return ActorOutput(jnp.broadcast_to(params, timestep.first.shape).astype(jnp.int32)), state

    def sampled(params, state, timestep, key):
        return ActorOutput(jnp.zeros(timestep.first.shape, jnp.int32)), state

    return Agent(lambda key: None, lambda size: jnp.zeros(size), sampled, lambda *_: None, greedy, name="constant")


@dataclasses.dataclass(frozen=True)
class Lasting:
    """Episodes of a drawn length from 1 to 6; reward 10 in the first step, then the action."""

    truncates: bool = False
    limit: int | None = None

    @property
    def spec(self):
        return api.Spec("lasting", api.Array((1,)), api.Discrete(3), self.truncates, self.limit)

    def reset(self, key):
        state = (jax.random.randint(key, (), 1, 7), jnp.zeros((), jnp.int32))
        return state, jnp.ones(1) * state[0]

    def step(self, state, action, key):
        length, steps = state
        steps = steps + 1
        over = steps >= length
        reward = jnp.where(steps == 1, 10.0, action.astype(jnp.float32))
        ended = (over & (not self.truncates), over & self.truncates)
        return (length, steps), api.Step(jnp.ones(1) * length, reward, *ended)


@pytest.mark.parametrize("truncates", [False, True])
@pytest.mark.parametrize("max_steps", [None, 1, 3, 6, 50])
def test_returns_lengths_and_caps_are_exact_in_both_reset_modes(truncates, max_steps):
    """Each of 64 episodes against its own drawn length; an episode that the cap cut is not finished."""
    env = Lasting(truncates)
    result = Evaluator(constant_agent(), env, 64, max_steps)(jnp.asarray(2), seed=3)
    env_key, _ = jax.random.split(jax.random.key(3))
    lengths = np.asarray(jax.vmap(lambda key: env.reset(key)[0][0])(jax.random.split(env_key, 64)))
    assert set(lengths) == {1, 2, 3, 4, 5, 6}
    cap = max_steps or 10_000
    np.testing.assert_array_equal(result.lengths, np.minimum(lengths, cap))
    np.testing.assert_array_equal(result.returns, 10.0 + 2.0 * (np.minimum(lengths, cap) - 1))
    np.testing.assert_array_equal(result.finished, lengths <= cap)
    assert result.summary()["unfinished"] == int((lengths > cap).sum())


def test_without_a_cap_the_environments_own_limit_is_the_cap():
    """`max_episode_steps` of the spec."""
    result = Evaluator(constant_agent(), Lasting(True, limit=2), 64)(jnp.asarray(0))
    assert result.lengths.max() == 2
    assert not result.finished.all()


def test_each_environment_counts_its_first_episode_only():
    """Returns of the scripted environment are those of episodes, not of what follows them."""
    result = Evaluator(constant_agent(), scripted.Scripted(SCRIPT), 32)(jnp.asarray(0))
    assert result.finished.all()
    assert set(result.lengths) == {1, 2, 3, 5}
    # Rewards are start + 10 k, with one start in [0, 1) for the whole episode.
    start = (result.returns - 5.0 * result.lengths * (result.lengths + 1)) / result.lengths
    assert ((start >= 0) & (start < 1)).all()


def test_greedy_takes_the_best_action_and_not_greedy_the_sampled_one():
    """Actions 2 and 0 of the constant agent."""
    agent, env = constant_agent(), Lasting()
    greedy, sampled = (Evaluator(agent, env, 32, greedy=g)(jnp.asarray(2)) for g in (True, False))
    np.testing.assert_array_equal(greedy.returns - sampled.returns, 2.0 * (greedy.lengths - 1))


def test_an_agent_without_a_greedy_step_is_evaluated_as_it_explores_or_refused():
    """With a sentence that says so."""
    agent = dataclasses.replace(constant_agent(), greedy_step=None)
    with pytest.raises(UserError, match="agent constant has no greedy_step"):
        Evaluator(agent, Lasting(), 4)
    assert Evaluator(agent, Lasting(), 4, greedy=False)(jnp.asarray(2)).finished.all()


def test_the_seed_decides_everything():
    """The same seed, the same episodes; another seed, others; the largest seed works."""
    agent = tiny.a2c()
    params = agent.initial_learner_state(jax.random.key(0)).params
    evaluator = Evaluator(agent, tiny.catch(), 32, greedy=False)
    one, same, other = evaluator(params, 0), evaluator(params, 0), evaluator(params, 2**32 - 1)
    np.testing.assert_array_equal(one.returns, same.returns)
    assert (one.returns != other.returns).any()


def test_many_params_are_measured_at_once_as_one_by_one():
    """Three constant actions; the summary is a list per number."""
    actions = jnp.asarray([0, 1, 2])
    many = Evaluator(constant_agent(), Lasting(), 16, many=True)(actions, seed=5)
    one = Evaluator(constant_agent(), Lasting(), 16)
    assert many.returns.shape == (3, 16)
    for row, action in zip(many.returns, actions):
        np.testing.assert_array_equal(row, one(action, seed=5).returns)
    summary = many.summary()
    assert summary["return_mean"] == pytest.approx(many.returns.mean(-1).tolist())
    assert summary["unfinished"] == [0, 0, 0]
    assert summary["episodes"] == 16


def test_a_batch_with_cached_starts_is_evaluated_on_fresh_ones():
    """The evaluation would otherwise measure the start states of the training."""
    batch = Batch(envs.Catch(), starts="cached")
    assert Evaluator(constant_agent(), batch, 4).batch == Batch(envs.Catch())


@pytest.mark.parametrize("arguments", [{"episodes": 0}, {"max_steps": 0}, {"episodes": -3}])
def test_sizes_that_cannot_work_are_named(arguments):
    """Before anything is compiled."""
    with pytest.raises(UserError, match=next(iter(arguments))):
        Evaluator(constant_agent(), Lasting(), **arguments)
