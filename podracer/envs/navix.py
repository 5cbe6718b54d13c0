"""Grid worlds of navix (MiniGrid in JAX): https://github.com/epignatelli/navix."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.envs import adapting, api
from podracer.errors import unknown

# What `names()` lists without importing navix; other names that the installed navix knows work as well.
_LISTED = (
    "DistShift1 DistShift2 DoorKey-5x5 DoorKey-6x6 DoorKey-8x8 DoorKey-16x16 DoorKey-Random-5x5 DoorKey-Random-6x6 "
    "DoorKey-Random-8x8 DoorKey-Random-16x16 Dynamic-Obstacles-5x5 Dynamic-Obstacles-5x5-Random Dynamic-Obstacles-6x6 "
    "Dynamic-Obstacles-6x6-Random Dynamic-Obstacles-8x8 Dynamic-Obstacles-16x16 Empty-5x5 Empty-6x6 Empty-8x8 "
    "Empty-16x16 Empty-Random-5x5 Empty-Random-6x6 Empty-Random-8x8 Empty-Random-16x16 FourRooms GoToDoor-5x5 "
    "GoToDoor-6x6 GoToDoor-8x8 KeyCorridorS3R1 KeyCorridorS3R2 KeyCorridorS3R3 KeyCorridorS4R3 KeyCorridorS5R3 "
    "KeyCorridorS6R3 LavaGapS5 LavaGapS6 LavaGapS7 SimpleCrossingS9N1 SimpleCrossingS9N2 SimpleCrossingS9N3 "
    "SimpleCrossingS11N5"
)
NAMES = tuple(f"Navix-{name}-v0" for name in _LISTED.split())
# The least value of each channel and how many there are. Symbols: object, colour, state of a door or direction.
_SYMBOLS, _TAGS = ((0, 11), (0, 6), (0, 4)), ((-1, 12),)
OBSERVATIONS = {
    "symbolic": _SYMBOLS,
    "symbolic_first_person": _SYMBOLS,
    "categorical": _TAGS,
    "categorical_first_person": _TAGS,
    "rgb": (),
    "rgb_first_person": (),
}


@dataclasses.dataclass(frozen=True, init=False)
class Navix:
    """`navix.make(name)`, cut (not terminated) after `max_steps` steps.

    Symbols are numbers without an order, so each of their values becomes a plane, bool [height, width, planes];
    pictures stay uint8 [pixels, pixels, 3]. Obstacles move by the key that `step` is given, not by the one in navix's
    state, so that two episodes from the same start state differ.

    Args:
      name: such as "Navix-DoorKey-5x5-v0".
      observation: what the agent sees: "symbolic" (the whole grid), "categorical" (without colours and states), "rgb",
        or one of them with "_first_person".
      max_steps: the time limit in steps; None: 4 x height x width (navix before 1.0 has 100 for all).
      options: arguments of the environment's constructor (`reward_fn=...`).

    Raises:
      UserError: navix is not installed, or knows no such name or option.
    """

    name: str
    observation: str
    max_steps: int | None
    options: tuple[tuple[str, Any], ...]

    def __init__(self, name: str, observation: str = "symbolic", max_steps: int | None = None, **options: Any):
        if observation not in OBSERVATIONS:
            raise unknown("observation", str(observation), OBSERVATIONS, f"There are {', '.join(OBSERVATIONS)}.")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "observation", observation)
        object.__setattr__(self, "max_steps", max_steps)
        object.__setattr__(self, "options", adapting.freeze(options, f"navix/{name}"))
        _ = self.spec  # now: navix makes constants, which must not happen inside a traced function

    @functools.cached_property
    def made(self) -> Any:
        """navix's own environment."""
        try:
            import navix
        except ImportError as error:
            raise adapting.missing("navix", error) from error
        registered = list(navix.registry())
        if self.name not in registered:
            raise unknown("navix environment", self.name, registered, "See `podracer envs`.")
        options = dict(self.options)
        given = {"observation_fn": getattr(navix.observations, self.observation), "max_steps": self.max_steps}
        try:
            return navix.make(self.name, **given, **options)
        except (TypeError, ValueError) as error:
            known = {field.name for field in dataclasses.fields(navix.Environment)}
            raise adapting.bad_option(f"navix/{self.name}", error, options, known) from error

    @functools.cached_property
    def spec(self) -> api.Spec:
        env = self.made
        _, observation = jax.eval_shape(self.reset, jax.random.key(0))
        return api.Spec(
            name=f"navix/{self.name}",
            observation=adapting.array_spec(observation),
            action=api.Discrete(len(env.action_set)),
            truncates=True,
            max_episode_steps=adapting.limit(f"navix/{self.name}", "max_steps", env.max_steps),
        )

    def reset(self, key):
        return self._split(self.made.reset(key))

    def step(self, state, action, key):
        state = state.replace(state=state.state.replace(key=key))
        # The public `step` resets by itself; under vmap it would do so in every step.
        after = self.made._step(state, action)
        reward = jnp.asarray(after.reward, jnp.float32)
        state, observation = self._split(after)
        return state, api.Step(observation, reward, after.is_termination(), after.is_truncation())

    def _split(self, timestep):
        """`(state, observation)`; the state without the tiles to draw with (most of its size) unless they are used."""
        channels = OBSERVATIONS[self.observation]
        seen = timestep.observation
        if not channels:
            return timestep.replace(observation=()), seen
        seen = seen.reshape(*seen.shape[:2], len(channels)).astype(jnp.int32)
        planes = [
            jax.nn.one_hot(seen[..., position] - least, size, dtype=bool)
            for position, (least, size) in enumerate(channels)
        ]
        state = timestep.state.replace(cache=None)
        return timestep.replace(observation=(), state=state), jnp.concatenate(planes, -1)

    def render(self, state):
        """uint8 [height, width, 3]: the whole grid."""
        from navix import observations
        from navix.rendering.cache import RenderingCache

        grid = state.state.grid
        image = np.asarray(observations.rgb(state.state.replace(cache=RenderingCache.init(grid))))
        cell = max(1, -(-240 // image.shape[0]))
        return image.repeat(cell, 0).repeat(cell, 1)
