"""Evaluation on the host: whole games by their score, one per environment, however they end."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from podracer import agents, envs, mesh, networks
from podracer.envs import api
from podracer.envs.host import HostStep
from podracer.errors import UserError
from podracer.evaluate import Evaluator, HostEvaluator, evaluation_seeds, evaluator
from podracer.types import ActorOutput, Agent, TimeStep

ENDS = ("lost", "cut")


def counting_agent():
    """Its greedy action is the number of steps since the episode began, times its params: it needs its state."""

    def greedy(params, state, timestep, key):
        count = jnp.where(timestep.first, 0, state)
        return ActorOutput((count * params).astype(jnp.int32)), count + 1

    def sampled(params, state, timestep, key):
        return ActorOutput(jnp.zeros(timestep.first.shape, jnp.int32)), state

    zeros = lambda size: jnp.zeros(size, jnp.int32)
    return Agent(lambda key: None, zeros, sampled, lambda *_: None, greedy, name="counting")


@dataclasses.dataclass
class Lives:
    """Games of `lives` lives of `1 + seed % 5` steps each, of which the last is lost or cut; a life's end is a reset.

    The reward is a sign, the score of a step 10 plus the action.
    """

    lives: int = 2
    end: str = "lost"
    batch_size: int = 4
    closed: int = 0
    steps: int = 0

    @property
    def spec(self):
        return api.Spec("lives", api.Array((1,)), api.Discrete(9), truncates=True)

    def start(self, seeds):
        return _Lives(self, np.asarray(seeds))


class _Lives:
    def __init__(self, recipe, seeds):
        self.recipe, self.length = recipe, 1 + seeds % 5
        self.at, self.life, self.over = (np.zeros(len(seeds), int) for _ in range(3))

    def reset(self):
        size = len(self.at)
        zeros, ones, no = np.zeros(size, np.float32), np.ones(size, np.float32), np.zeros(size, bool)
        return HostStep(TimeStep(np.zeros((size, 1), np.float32), zeros, ones, ~no, no), zeros, no)

    def step(self, action):
        self.recipe.steps += 1
        reset = self.over > 0
        self.at = np.where(reset, 0, self.at + 1)
        ended = (self.at == self.length) & ~reset
        self.life = self.life + ended
        game_over = ended & (self.life == self.recipe.lives)
        self.life[game_over] = 0
        cut = game_over & (self.recipe.end == "cut")
        score = np.where(reset, 0, 10 + action).astype(np.float32)
        self.over = ended.astype(int)
        seen = np.zeros((len(self.at), 1), np.float32)
        timestep = TimeStep(seen, np.sign(score), (~(ended & ~cut)).astype(np.float32), reset, ~reset)
        return HostStep(timestep, score, game_over)

    def close(self):
        self.recipe.closed += 1


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("lives", [1, 3])
@pytest.mark.parametrize("max_steps", [None, 1, 4, 7])
def test_scores_of_whole_games_against_numpy(max_steps, lives, end):
    """Lost lives begin anew what the agent remembers, but not the score; resets and what follows count nothing."""
    env = Lives(lives, end, batch_size=2)
    got = HostEvaluator(counting_agent(), env, 6, max_steps)(jnp.int32(1), seed=3)
    for i, seed in enumerate(evaluation_seeds(3, 6)):
        rewards = [10 + step for _ in range(lives) for step in range(1 + seed % 5)]
        counted = rewards[: max_steps or 10_000]
        assert got.returns[i] == sum(counted) and got.lengths[i] == len(counted)
        assert got.finished[i] == (len(counted) == len(rewards))
    assert got.summary()["unfinished"] == int((~got.finished).sum()) and got.returns.shape == (6,)


def test_the_environments_are_closed_whatever_happens():
    calls = []

    def interrupted():
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt

    measure = HostEvaluator(counting_agent(), Lives(lives=5), 3, between_steps=interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure(jnp.int32(0))
    assert (measure.env.steps, measure.env.closed) == (2, 1)
    assert measure(jnp.int32(0)).finished.all() and measure.env.closed == 2


def test_seeds_are_distinct_repeatable_and_not_those_of_training():
    for count in (1, 10, 1000):
        seeds = evaluation_seeds(0, count)
        assert len(set(seeds)) == count and min(seeds) >= 2**30 and max(seeds) < 2**31
    assert evaluation_seeds(5, 4) == evaluation_seeds(5, 4) != evaluation_seeds(6, 4)


@pytest.mark.parametrize("env", [envs.Catch(), envs.CartPole(max_steps=30)], ids=["same-step", "next-step"])
def test_a_compiled_environment_on_the_host_says_what_it_says_by_itself(env):
    """Lengths, returns and whether episodes finished, for a policy that ends all of them, and one that is cut."""
    network = networks.mlp((8,))
    agent = agents.a2c(env.spec, network=network)
    params = agent.initial_learner_state(jax.random.key(0)).params
    host, compiled = (evaluator(agent, which, 16)(params) for which in (envs.on_host(env, 4), env))
    assert host.finished.all() and compiled.finished.all()
    if isinstance(env, envs.Catch):
        assert (host.lengths == compiled.lengths).all() and set(host.returns) <= {-1.0, 1.0}
    else:
        assert (host.returns == host.lengths).all() and host.lengths.max() <= 30
    assert isinstance(evaluator(agent, env, 2), Evaluator)


def test_an_episode_that_is_cut_at_its_limit_is_finished():
    """Balancing for 3 steps needs no skill."""
    env = envs.on_host(envs.CartPole(max_steps=3), 4)
    agent = agents.a2c(env.spec, network=networks.mlp((4,)))
    got = HostEvaluator(agent, env, 5)(agent.initial_learner_state(jax.random.key(0)).params)
    assert got.finished.all() and (got.returns == 3).all() and (got.lengths == 3).all()


def test_envpool_cartpole_and_replicated_params():
    """Params on all learner cores are used where they are."""
    pytest.importorskip("envpool")
    env = envs.make("envpool/CartPole-v1", num_threads=1)
    agent = agents.ppo(env.spec, network=networks.lstm(4, networks.mlp((8,))))
    params = agent.initial_learner_state(jax.random.key(0)).params
    measure = HostEvaluator(agent, env, 8)
    one = measure(params, seed=2)
    assert one.finished.all() and (one.returns == one.lengths).all() and len(np.unique(one.returns)) > 1
    many = jax.device_put(params, NamedSharding(mesh.over(jax.devices()[:2]), PartitionSpec()))
    again = measure(many, seed=2)
    assert np.array_equal(one.returns, again.returns)
    assert np.array_equal(HostEvaluator(agent, env, 8, greedy=False)(params).finished, np.ones(8, bool))


def test_an_agent_without_greedy_step_is_refused():
    agent = dataclasses.replace(counting_agent(), greedy_step=None)
    with pytest.raises(UserError, match="agent counting has no greedy_step"):
        HostEvaluator(agent, Lives())
    assert HostEvaluator(agent, Lives(), 2, greedy=False)(None).finished.all()
