"""Without lag, and fed the same random numbers, Sebulba takes Anakin's updates."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anakin.loop import Anakin
from podracer import agents, envs, networks
from podracer.envs.batch import Batch
from podracer.envs.host import HostStep
from sebulba.lag import Lag
from sebulba.loop import Sebulba
from sebulba.topology import split

T, B, UPDATES = 5, 8, 4


@dataclasses.dataclass(frozen=True)
class SameKeys:
    """A jittable environment on the host, with the keys that Anakin gives to a batch of that size."""

    env: object
    batch_size: int = B
    unroll_length: int = T

    @property
    def spec(self):
        return self.env.spec

    def start(self, seeds):
        return _SameKeys(self)


class _SameKeys:
    def __init__(self, recipe):
        self._batch, self._unroll_length, self._steps = Batch(recipe.env), recipe.unroll_length, 0
        _, self._env_key, self._run_key = jax.random.split(jax.random.key(0), 3)
        self._size = recipe.batch_size
        self._step = jax.jit(self._batch.step)

    def reset(self):
        self._state, timestep = self._batch.init(jax.random.split(self._env_key, self._size))
        return self._host(timestep)

    def step(self, action):
        update, number = divmod(self._steps, self._unroll_length)
        key = jax.random.fold_in(self._run_key, np.uint32(update))
        keys = [jax.random.fold_in(key, np.uint32(n | 1 << 31)) for n in range(self._size)]
        keys = jnp.stack([jax.random.split(key, self._unroll_length)[number] for key in keys])
        self._steps += 1
        self._state, timestep = self._step(self._state, action, keys)
        return self._host(timestep)

    def close(self):
        pass

    def _host(self, timestep):
        timestep = jax.tree.map(np.asarray, timestep)
        return HostStep(timestep, timestep.reward, timestep.first)


def with_own_keys(agent):
    """`agent` drawing its actions from keys in its actor state: architectures hand out different ones."""

    def initial_actor_state(batch_size):
        return agent.initial_actor_state(batch_size), jnp.arange(batch_size, dtype=jnp.uint32)

    def actor_step(params, actor_state, timestep, key):
        inner, numbers = actor_state
        key = jax.random.fold_in(jax.random.key(7), numbers[0])
        output, inner = agent.actor_step(params, inner, timestep, key)
        return output, (inner, numbers + jnp.uint32(1000))

    def learner_step(state, trajectory, key, axis_name):
        return agent.learner_step(state, trajectory._replace(actor_state=trajectory.actor_state[0]), key, axis_name)

    functions = {"initial_actor_state": initial_actor_state, "actor_step": actor_step, "learner_step": learner_step}
    return dataclasses.replace(agent, rebuild=None, **functions)


@pytest.mark.parametrize(
    ("make", "config", "network"),
    [
        (agents.a2c, {}, networks.mlp((16,))),
        (agents.impala, {}, networks.mlp((16,))),
        (agents.ppo, {"epochs": 2, "minibatches": 2}, networks.mlp((16,))),
        (agents.ppo, {"epochs": 1, "minibatches": 2}, networks.lstm(size=8)),
        (agents.pqn, {"epochs": 1, "minibatches": 2}, networks.mlp((16,))),
    ],
)
@pytest.mark.parametrize("env", [envs.Catch(), envs.CartPole(max_steps=7)])
def test_updates_are_those_of_anakin(make, config, network, env):
    kind = type(make(env.spec).config)
    config = kind(learning_rate=0.1, optimizer="sgd", **config)
    agent = with_own_keys(make(env.spec, config, network))

    loop = Anakin(agent, env, B, T, updates_per_call=1, num_cores=1)
    state = loop.init(0)
    system = Sebulba(agent, SameKeys(env), split(2, 1, 1, B), T, Lag.parse("sync"))
    theirs = []
    system.run(UPDATES, lambda update: bool(theirs.append(jax.device_get(system.learner.state.params))))
    first = jax.device_get(state.learner.params)
    for params in theirs:
        state, _ = loop.step(state)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), jax.device_get(state.learner.params), params
        )
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), first, theirs[-1])
    assert max(jax.tree.leaves(moved)) > 1e-4
