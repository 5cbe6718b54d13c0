"""Gymnasium environments whose episodes have chosen lengths and ends; importing this registers them."""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium import spaces

SCRIPT = ((3, False), (1, True), (5, True), (1, False), (2, False))


class Scripted(gymnasium.Env):
    """Line i of the script is (length, truncated); episodes take lines in turn, from the seed on.

    Observation: [seed, episode, step]. The reward of step k is `10 * episode + k + action / 8`.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}
    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = spaces.Discrete(4, start=2)

    def __init__(self, render_mode=None):
        self.render_mode, self.episode = render_mode, -1

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.start = seed
        self.episode, self.steps = self.episode + 1, 0
        return self.observe(), {}

    def step(self, action):
        self.steps += 1
        length, cut = SCRIPT[(self.start + self.episode) % len(SCRIPT)]
        over = self.steps >= length
        reward = 10.0 * self.episode + self.steps + (float(np.sum(action)) - 2) / 8
        return self.observe(), reward, over and not cut, over and cut, {}

    def observe(self):
        return np.array([self.start, self.episode, self.steps], np.float64)

    def render(self):
        return np.full((8, 6, 3), self.steps, np.uint8)


class Composed(Scripted):
    """Dict observations with a mask and a picture, several choices as action."""

    observation_space = spaces.Dict(
        {
            "place": spaces.Discrete(5, start=1),
            "picture": spaces.Box(0, 255, (4, 4, 3), np.uint8),
            "both": spaces.Tuple((spaces.MultiBinary(2), spaces.Box(0.0, 1.0, (2, 2), np.float32))),
        }
    )
    action_space = spaces.MultiDiscrete([3, 2], start=[0, 1])

    def observe(self):
        picture = np.full((4, 4, 3), self.steps, np.uint8)
        both = (np.array([1, 0], np.int8), np.full((2, 2), 0.5, np.float32))
        return {"place": 1 + self.steps % 5, "picture": picture, "both": both}


class Boxed(Scripted):
    """Bounded and unbounded continuous actions of two axes, echoed as the reward; a mask that is a byte per action."""

    observation_space = spaces.Dict({"seen": spaces.Box(-1, 1, (1,)), "action_mask": spaces.MultiBinary(4)})
    action_space = spaces.Box(np.array([[0.0, -np.inf]]), np.array([[10.0, np.inf]]), dtype=np.float64)

    def observe(self):
        return {"seen": np.zeros(1, np.float32), "action_mask": np.array([1, 0, 1, 1], np.int8)}

    def step(self, action):
        assert action.shape == (1, 2)
        return self.observe(), float(action[0, 0] + 100 * action[0, 1]), False, False, {}


class Wrong(Scripted):
    """Gives other observations than it says, at once or later."""

    def __init__(self, after=0, **others):
        super().__init__(**others)
        self.after = after

    def observe(self):
        return np.zeros(3 if self.steps < self.after else 4)


for name, kind in {"Scripted": Scripted, "Composed": Composed, "Boxed": Boxed, "Wrong": Wrong}.items():
    if f"Podracer{name}-v0" not in gymnasium.registry:
        gymnasium.register(f"Podracer{name}-v0", kind)
