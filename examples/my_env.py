"""An environment of your own: a drone that should hover at a given height in gusty wind.

python examples/my_env.py                                       train on it from Python
podracer train anakin --env examples/my_env.py:Drone --env.gust 0.03
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer.envs import api


class State(NamedTuple):
    height: jax.Array  # [] float32, 0 is the ground, 1 the ceiling
    speed: jax.Array  # [] float32, upwards, per step
    steps: jax.Array  # [] int32, steps of this episode


@dataclasses.dataclass(frozen=True)
class Drone:
    """Reward 1 per step at height 0.5, less the farther away; touching ground or ceiling ends the episode.

    Actions: 0 sink, 1 hold, 2 climb. Observation: float32 [2], distance from the target and speed.
    """

    gust: float = 0.02
    max_steps: int = 100

    @property
    def spec(self) -> api.Spec:
        return api.Spec("drone", api.Array((2,)), api.Discrete(3), truncates=True, max_episode_steps=self.max_steps)

    def reset(self, key):
        state = State(jax.random.uniform(key, (), minval=0.2, maxval=0.8), jnp.zeros(()), jnp.zeros((), jnp.int32))
        return state, self._observe(state)

    def step(self, state, action, key):
        thrust = 0.02 * (action - 1)
        speed = 0.9 * state.speed + thrust + self.gust * jax.random.normal(key)
        state = State(state.height + speed, speed, state.steps + 1)
        crashed = (state.height <= 0.0) | (state.height >= 1.0)
        reward = jnp.where(crashed, 0.0, 1.0 - 2.0 * jnp.abs(state.height - 0.5))
        truncated = (state.steps >= self.max_steps) & ~crashed
        return state, api.Step(self._observe(state), reward, crashed, truncated)

    def _observe(self, state):
        return jnp.stack([2.0 * (state.height - 0.5), 10.0 * state.speed])

    def render(self, state):
        image = np.full((120, 60, 3), (24, 26, 32), np.uint8)
        image[59:61] = (90, 94, 104)  # the height to keep
        row = int(np.clip(120 * (1.0 - float(state.height)), 4, 115))
        image[row - 3 : row + 3, 22:38] = (255, 196, 60)
        return image


if __name__ == "__main__":
    import sys

    import anakin
    from podracer import agents

    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
    env = Drone()
    run = anakin.train(agents.ppo(env.spec), env, total_steps=steps, batch_per_core=32, unroll_length=32)
    print(f"drone after {run.steps:,} steps: mean return {run.evaluate().returns.mean():.1f} of {env.max_steps}")
