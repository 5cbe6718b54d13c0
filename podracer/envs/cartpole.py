"""CartPole-v1: balance a pole on a cart (Barto, Sutton and Anderson 1983; constants and limits of Gymnasium's v1)."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer.envs import api

GRAVITY = 9.8  # m / s^2
CART_MASS, POLE_MASS = 1.0, 0.1  # kg
HALF_LENGTH = 0.5  # m
FORCE = 10.0  # N
STEP_S = 0.02
MAX_POSITION = 2.4  # m
MAX_ANGLE = 12 * 2 * math.pi / 360  # rad


class State(NamedTuple):
    physics: jax.Array  # [4] float32: position, velocity, angle, angular velocity
    steps: jax.Array  # [] int32, steps of this episode


@dataclasses.dataclass(frozen=True)
class CartPole:
    """Reward 1 per step; terminates when the pole or the cart leaves its limits, truncates after `max_steps`.

    Actions: 0 left, 1 right. Observation: float32 [4], or [2] (position, angle) with `mask_velocity`, which makes
    the task one for agents with a memory.
    """

    max_steps: int = 500
    mask_velocity: bool = False

    @property
    def spec(self) -> api.Spec:
        name = "cartpole-masked" if self.mask_velocity else "cartpole"
        observation = api.Array((2 if self.mask_velocity else 4,))
        return api.Spec(name, observation, api.Discrete(2), truncates=True, max_episode_steps=self.max_steps)

    def reset(self, key):
        physics = jax.random.uniform(key, (4,), jnp.float32, -0.05, 0.05)
        return State(physics, jnp.zeros((), jnp.int32)), self._observe(physics)

    def step(self, state, action, key):
        position, velocity, angle, spin = state.physics
        force = jnp.where(action == 1, FORCE, -FORCE)
        cosine, sine = jnp.cos(angle), jnp.sin(angle)
        total_mass = CART_MASS + POLE_MASS
        push = (force + POLE_MASS * HALF_LENGTH * spin**2 * sine) / total_mass
        spin_rate = (GRAVITY * sine - cosine * push) / (HALF_LENGTH * (4.0 / 3.0 - POLE_MASS * cosine**2 / total_mass))
        acceleration = push - POLE_MASS * HALF_LENGTH * spin_rate * cosine / total_mass
        physics = jnp.stack(
            [
                position + STEP_S * velocity,
                velocity + STEP_S * acceleration,
                angle + STEP_S * spin,
                spin + STEP_S * spin_rate,
            ]
        )
        steps = state.steps + 1
        terminated = (jnp.abs(physics[0]) > MAX_POSITION) | (jnp.abs(physics[2]) > MAX_ANGLE)
        truncated = (steps >= self.max_steps) & ~terminated
        out = api.Step(self._observe(physics), jnp.ones((), jnp.float32), terminated, truncated)
        return State(physics, steps), out

    def _observe(self, physics):
        return physics[::2] if self.mask_velocity else physics

    def render(self, state):
        height, width = 200, 300
        image = np.full((height, width, 3), (24, 26, 32), np.uint8)
        floor = 150
        image[floor : floor + 2] = (90, 94, 104)
        centre = int(width / 2 + float(state.physics[0]) / MAX_POSITION * (width / 2 - 30))
        angle = float(state.physics[2])
        image[floor - 14 : floor, max(centre - 20, 0) : max(centre + 20, 0)] = (90, 200, 250)
        for distance in np.linspace(0, 90, 180):
            row, column = floor - 14 - distance * math.cos(angle), centre + distance * math.sin(angle)
            row, column = int(row), int(column)
            image[max(row - 2, 0) : row + 2, max(column - 2, 0) : max(column + 2, 0)] = (255, 196, 60)
        return image
