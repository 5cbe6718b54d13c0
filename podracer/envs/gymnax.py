"""Environments of gymnax (classic control, MinAtar, bsuite): https://github.com/RobertTLange/gymnax."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from podracer.envs import adapting, api
from podracer.errors import UserError, unknown

# What `names()` lists without importing gymnax; other names that the installed gymnax knows work as well.
NAMES = {
    "CartPole-v1": "balance a pole on a cart",
    "Pendulum-v1": "swing a pendulum up and hold it; continuous actions",
    "Acrobot-v1": "swing two joined links above a line",
    "MountainCar-v0": "rock a weak car up a hill",
    "MountainCarContinuous-v0": "rock a weak car up a hill; continuous actions",
    "Asterix-MinAtar": "collect treasure, avoid enemies; 10 x 10 planes",
    "Breakout-MinAtar": "break bricks with a ball; 10 x 10 planes",
    "Freeway-MinAtar": "cross a road between cars; 10 x 10 planes",
    "Seaquest-MinAtar": "rescue divers, shoot, mind the oxygen; 10 x 10 planes",
    "SpaceInvaders-MinAtar": "shoot aliens before they land; 10 x 10 planes",
    "Catch-bsuite": "catch a falling ball with a paddle",
    "DeepSea-bsuite": "dive to a treasure that random actions hardly ever find: explore",
    "MemoryChain-bsuite": "repeat a cue seen some steps before: remember",
    "UmbrellaChain-bsuite": "take the right umbrella at the start, for rain at the end: assign credit",
    "DiscountingChain-bsuite": "choose between rewards that come sooner or later",
    "MNISTBandit-bsuite": "classify a digit, one step (gymnax loads MNIST)",
    "SimpleBandit-bsuite": "find the best of eleven arms",
    "FourRooms-misc": "walk to a goal between the walls of four rooms",
    "MetaMaze-misc": "learn the way through a maze within one episode",
    "PointRobot-misc": "find a hidden goal on a circle, within one episode",
    "BernoulliBandit-misc": "find the better of two arms, within one episode",
    "GaussianBandit-misc": "find the better of two arms with noisy rewards, within one episode",
    "Reacher-misc": "reach a target with an arm of two joints; continuous actions",
    "Swimmer-misc": "swim forwards with a chain of links; continuous actions",
    "Pong-misc": "play Pong on a small field",
    "FrozenLake-misc": "cross a frozen lake without falling into a hole",
}
NEVER = 2**30  # a time limit that no episode reaches


@dataclasses.dataclass(frozen=True, init=False)
class Gymnax:
    """`gymnax.make(name)`, with time limits told apart from ends of the task.

    Both generations of the API work. gymnax 1.x has `is_truncated`. gymnax 0.0.9 has one `done` for both: it is
    asked a second time with a limit that is never reached, so that an episode that ends at its limit counts as
    terminated only if the task ended there, too (compilers merge the two steps).

    Observations are float32 (MinAtar's planes, too, because gymnax makes them so); a discrete observation becomes
    a one-hot vector. `render` draws environments whose observation is a stack of planes.

    Args:
      name: such as "CartPole-v1" or "Breakout-MinAtar".
      options: fields of the environment's parameters (`max_steps_in_episode=200`) or arguments of its constructor
        (`use_minimal_action_set=False`).

    Raises:
      UserError: gymnax is not installed, or knows no such name or option.
    """

    name: str
    options: tuple[tuple[str, Any], ...]

    def __init__(self, name: str, **options: Any):
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "options", adapting.freeze(options, f"gymnax/{name}"))
        _ = self.spec  # now: gymnax makes constants, which must not happen inside a traced function

    @functools.cached_property
    def made(self) -> tuple[Any, Any]:
        """gymnax's own (environment, parameters)."""
        try:
            import gymnax
        except ImportError as error:
            raise adapting.missing("gymnax", error) from error
        registered = list(getattr(gymnax, "registered_envs", NAMES))
        if self.name not in registered:
            raise unknown("gymnax environment", self.name, registered, "See `podracer envs`.")
        options = dict(self.options)
        if not options:
            return gymnax.make(self.name)
        fields = {field.name for field in dataclasses.fields(gymnax.make(self.name)[1])}
        chosen = {name: value for name, value in options.items() if name in fields}
        rest = {name: value for name, value in options.items() if name not in fields}
        try:
            env, params = gymnax.make(self.name, **rest)
        except (TypeError, ValueError) as error:
            raise adapting.bad_option(f"gymnax/{self.name}", error, rest, fields) from error
        return env, params.replace(**chosen)

    @functools.cached_property
    def spec(self) -> api.Spec:
        _, params = self.made
        action = self._action_spec
        state, observation = jax.eval_shape(self.reset, jax.random.key(0))
        limit = getattr(params, "max_steps_in_episode", None)
        limit = int(limit) if limit is not None and hasattr(state, "time") else None
        return api.Spec(
            name=f"gymnax/{self.name}",
            observation=adapting.array_spec(observation),
            action=action,
            truncates=limit is not None,
            max_episode_steps=limit,
        )

    @functools.cached_property
    def _action_spec(self) -> api.Action:
        space = self._action_space
        if hasattr(space, "n"):
            return api.Discrete(int(space.n))
        if hasattr(space, "low"):
            return adapting.continuous(space.low, space.high, tuple(space.shape))
        raise UserError(
            f"gymnax/{self.name} has actions of type {type(space).__name__}; expected Discrete or Box. "
            "Wrap it in an environment of your own."
        )

    @functools.cached_property
    def _action_space(self) -> Any:
        env, params = self.made
        return env.action_space(params)

    def reset(self, key):
        env, params = self.made
        observation, state = env.reset_env(key, params)
        return state, self._observe(observation)

    def step(self, state, action, key):
        env, params = self.made
        if isinstance(self._action_spec, api.Continuous):
            action = action.reshape(self._action_space.shape)
        observation, after, reward, terminated, *flags, _ = env.step_env(key, state, action, params)
        if flags:
            (truncated,) = flags
        elif hasattr(env, "is_truncated"):
            truncated = env.is_truncated(after, params)
        elif hasattr(after, "time") and hasattr(params, "max_steps_in_episode"):
            truncated = after.time >= params.max_steps_in_episode
            terminated = env.step_env(key, state, action, params.replace(max_steps_in_episode=NEVER))[3]
        else:
            truncated = False
        terminated = jnp.asarray(terminated, bool)
        truncated = jnp.asarray(truncated, bool) & ~terminated
        reward = jnp.asarray(reward, jnp.float32)
        return after, api.Step(self._observe(observation), reward, terminated, truncated)

    def _observe(self, observation):
        env, params = self.made
        space = env.observation_space(params)
        if hasattr(space, "n"):
            return jax.nn.one_hot(observation, space.n, dtype=jnp.float32)
        return adapting.compact(observation)

    def render(self, state):
        """uint8 [height, width, 3] of an environment whose observation is made of planes (MinAtar, bsuite's Catch)."""
        env, params = self.made
        leaf = self.spec.observation
        if not isinstance(leaf, api.Array) or len(leaf.shape) not in (2, 3):
            raise UserError(f"gymnax/{self.name} cannot be drawn: its observation is not a grid of planes.")
        if hasattr(env, "observe"):
            planes = env.observe(jax.random.key(0), state, None, params)
        else:
            planes = env.get_obs(state)
        return adapting.draw_planes(planes)
