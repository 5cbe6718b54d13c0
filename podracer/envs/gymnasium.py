"""Environments of Gymnasium, on the host: https://gymnasium.farama.org.

Any environment that `gymnasium.make` knows, in a vector environment: one after the other in this process
("sync"), or in a process each ("async"). Processes are spawned: a fork of a process in which JAX runs may hang.

Of Gymnasium's ways to reset, this adapter uses the one that keeps the final observation an ordinary one (NEXT_STEP):
the step after an end is a reset, and `ResetTracker` marks it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np

from podracer.envs import adapting, api
from podracer.envs.batch import to_environment
from podracer.envs.host import HostStep, ResetTracker
from podracer.errors import UserError, check_number, unknown

Vectorization = Literal["sync", "async"]


def make(id: str, vectorization: Vectorization = "sync", **options: Any) -> Gymnasium:
    """`gymnasium/ID`: `vectorization`, and whatever `gymnasium.make` and the environment take as options."""
    return Gymnasium(id, vectorization=vectorization, options=options)  # type: ignore


@dataclasses.dataclass(frozen=True)
class Gymnasium:
    """`gymnasium.make(id, **options)`, many times.

    Observations: float64 becomes float32 and int64 int32; discrete ones become one-hot vectors; dicts and tuples stay.
    A leaf "action_mask" of a dict becomes bool and marks the legal actions. Actions: discrete, multi-discrete,
    multi-binary (as choices of two) and bounded or unbounded boxes (flattened, in [-1, 1] where bounded).

    Args:
      id: such as "CartPole-v1", or "package.module:MyEnv-v0" to import what registers it.
      batch_size: environments per actor thread.
      vectorization: "sync", or "async" for a process per environment, which pays for slow environments.
      options: arguments of `gymnasium.make`, a dict or pairs.

    Raises:
      UserError: Gymnasium is not installed or knows no such environment, or `vectorization` is neither.
    """

    id: str
    batch_size: int = 16
    vectorization: Vectorization = "sync"
    options: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self):
        check_number("batch_size", self.batch_size, minimum=1)
        known = get_args(Vectorization)
        if self.vectorization not in known:
            raise unknown("vectorization", str(self.vectorization), known, f"Expected {' or '.join(known)}.")
        object.__setattr__(self, "options", adapting.freeze(dict(self.options), self.name))
        gymnasium, (module, _, short) = _library(), self.id.rpartition(":")
        try:
            if module:
                _import(module)
            gymnasium.spec(short)
        except ImportError as error:
            raise UserError(f"{self.name} imports {module}, which fails: {error}. Expected module:ID.") from error
        except gymnasium.error.Error:
            do = "`gymnasium.pprint_registry()` lists them."
            raise unknown("gymnasium environment", short, gymnasium.registry, do) from None

    @property
    def name(self) -> str:
        return f"gymnasium/{self.id}"

    @functools.cached_property
    def spec(self) -> api.Spec:
        made = self.make_one()
        try:
            observation, _ = made.reset(seed=0)
            _check(self.name, made.observation_space, observation)
            limit = None if made.spec is None else made.spec.max_episode_steps
            return api.Spec(
                self.name,
                observations(self.name, made.observation_space).spec,
                actions(self.name, made.action_space).spec,
                truncates=True,
                max_episode_steps=limit,
            )
        finally:
            made.close()

    def make_one(self, **more: Any) -> Any:
        """One of Gymnasium's environments, not vectorized."""
        gymnasium, options = _library(), {**dict(self.options), **more}
        try:
            return gymnasium.make(self.id, disable_env_checker=True, **options)
        except TypeError as error:
            raise adapting.bad_option(self.name, error, options, ()) from error
        except gymnasium.error.Error as error:
            raise UserError(f"{self.name} cannot be made: {error} Install or change what it names.") from error

    def start(self, seeds: Sequence[int]) -> _Batch:
        if len(seeds) != self.batch_size:
            raise UserError(f"{self.name}: {len(seeds)} seeds for {self.batch_size} environments; expected as many.")
        return _Batch(self, seeds, self.vectorization)

    def start_drawn(self, seed: int) -> _Batch:
        """A batch of one that can be drawn.

        Raises:
          UserError: the environment does not draw itself.
        """
        # Many environments draw with SDL, which would look for a screen and a loudspeaker.
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
        made = self.make_one()
        supported = made.metadata.get("render_modes", [])
        made.close()
        if "rgb_array" not in supported:
            raise UserError(f"{self.name} cannot be drawn: it has render modes {supported}; expected 'rgb_array'.")
        return _Batch(dataclasses.replace(self, batch_size=1), [seed], "sync", render_mode="rgb_array")


class _Batch:
    """A running vector environment."""

    def __init__(self, recipe: Gymnasium, seeds: Sequence[int], vectorization: str, **more: Any):
        gymnasium = _library()
        self._name, self._seeds, self._closed = recipe.name, [int(seed) for seed in seeds], False
        # What a spawned process must import to make its environment is Gymnasium, not this package and JAX.
        options = {"disable_env_checker": True, **dict(recipe.options), **more}
        makers = [functools.partial(gymnasium.make, recipe.id, **options) for _ in seeds]
        mode = gymnasium.vector.AutoresetMode.NEXT_STEP
        if vectorization == "async":
            self._vector = gymnasium.vector.AsyncVectorEnv(makers, context="spawn", autoreset_mode=mode)
        else:
            self._vector = gymnasium.vector.SyncVectorEnv(makers, autoreset_mode=mode)
        used = self._vector.metadata.get("autoreset_mode")
        if used is not mode:
            self.close()
            raise UserError(f"{self._name} resets itself in mode {used}; expected {mode}. Remove what changes it.")
        self._observe = observations(self._name, self._vector.single_observation_space).convert
        self._act = actions(self._name, self._vector.single_action_space).convert
        self._tracker = ResetTracker(len(seeds))

    def reset(self) -> HostStep:
        observation, _ = self._guarded(lambda: self._vector.reset(seed=self._seeds))
        zeros = np.zeros(len(self._seeds), np.float32)
        return HostStep(self._tracker.first(self._observe(observation)), zeros, zeros.astype(bool))

    def step(self, action: np.ndarray) -> HostStep:
        done = self._guarded(lambda: self._vector.step(self._act(np.asarray(action))))
        observation, reward, terminated, truncated, _ = done
        timestep = self._tracker.add(self._observe(observation), reward, terminated, truncated)
        return HostStep(timestep, np.asarray(timestep.reward), (terminated | truncated) & timestep.valid)

    def render(self) -> np.ndarray:
        """uint8 [height, width, 3] of the first environment; only of a batch that was started to be drawn."""
        return np.asarray(self._vector.render()[0])

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._vector.close()

    def _guarded(self, call: Callable[[], Any]) -> Any:
        """`call()`. Gymnasium stacks the observations with numpy, whose error does not say whose they are."""
        try:
            return call()
        except ValueError as error:
            raise UserError(
                f"{self._name}: an observation is not as its observation_space says, "
                f"{self._vector.single_observation_space} ({error}). Change one of them."
            ) from error


@dataclasses.dataclass(frozen=True)
class Converter:
    """A space in our words, and numpy batches of it translated."""

    spec: Any
    convert: Callable[[Any], Any]


def observations(name: str, space: Any, key: str = "") -> Converter:
    """What Gymnasium's observations [B, ...] are in our words.

    Raises:
      UserError: naming `name`, a space that has no equal here.
    """
    spaces = _library().spaces
    if isinstance(space, spaces.Dict):
        parts = {each: observations(name, part, each) for each, part in space.spaces.items()}
        spec = {each: part.spec for each, part in parts.items()}
        return Converter(spec, lambda seen: {each: part.convert(seen[each]) for each, part in parts.items()})
    if isinstance(space, spaces.Tuple):
        items = [observations(name, part) for part in space.spaces]
        spec = tuple(item.spec for item in items)
        return Converter(spec, lambda seen: tuple(item.convert(one) for item, one in zip(items, seen, strict=True)))
    if isinstance(space, spaces.Discrete):
        values = np.arange(space.start, space.start + space.n)
        spec = api.Array((int(space.n),))
        return Converter(spec, lambda seen: (np.asarray(seen)[:, None] == values).astype(np.float32))
    if isinstance(space, spaces.Box | spaces.MultiBinary | spaces.MultiDiscrete):
        smaller = {"float64": np.float32, "int64": np.int32, "uint64": np.uint32}
        kind = np.dtype(bool if key == "action_mask" else smaller.get(space.dtype.name, space.dtype))
        return Converter(api.Array(tuple(space.shape), kind), lambda seen: np.asarray(seen, kind))
    raise UserError(
        f"{name} has observations {space}; expected boxes, discrete ones, or dicts and tuples of them. "
        "Wrap the environment, for example with gymnasium.wrappers.FlattenObservation."
    )


def actions(name: str, space: Any) -> Converter:
    """What our actions [B, ...] are in Gymnasium's.

    Raises:
      UserError: naming `name`, a space that has no equal here.
    """
    spaces = _library().spaces
    if isinstance(space, spaces.Discrete):
        return Converter(api.Discrete(int(space.n)), lambda action: action.astype(space.dtype) + space.start)
    if isinstance(space, spaces.MultiBinary) and len(space.shape) == 1:
        return Converter(api.MultiDiscrete((2,) * space.shape[0]), lambda action: action.astype(space.dtype))
    if isinstance(space, spaces.MultiDiscrete) and len(space.shape) == 1:
        values = tuple(int(n) for n in space.nvec)
        return Converter(api.MultiDiscrete(values), lambda action: (action + space.start).astype(space.dtype))
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        ours = adapting.continuous(space.low, space.high, tuple(space.shape))

        def convert(action):
            return np.asarray(to_environment(ours, action, np)).reshape(-1, *space.shape).astype(space.dtype)

        return Converter(ours, convert)
    raise UserError(
        f"{name} has actions {space}; expected discrete ones or a box of floats. Wrap the environment, for example "
        "with gymnasium.wrappers.TransformAction."
    )


def _check(name: str, space: Any, observation: Any, path: str = "observation") -> None:
    """Refuse one observation that is not of the space, naming the leaf."""
    spaces = _library().spaces
    if isinstance(space, spaces.Dict | spaces.Tuple):
        is_dict = isinstance(space, spaces.Dict)
        parts = dict(space.spaces) if is_dict else dict(enumerate(space.spaces))
        found = dict(observation) if is_dict else dict(enumerate(observation))
        if set(parts) != set(found):
            raise UserError(f"{name}: {path} has {sorted(found)}; expected {sorted(parts)}. Change one of them.")
        for key, part in parts.items():
            _check(name, part, found[key], f"{path}[{key!r}]")
    elif np.shape(observation) != tuple(space.shape or ()):
        raise UserError(
            f"{name}: {path} has shape {np.shape(observation)}; expected {tuple(space.shape)}, as its "
            "observation_space says. Change one of them."
        )


def _import(module: str) -> None:
    """Import what registers an environment: from where Python finds it, or from the working directory."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        here = os.getcwd()
        if error.name != module.partition(".")[0] or here in sys.path:
            raise
        sys.path.append(here)  # for good: processes that are started later look there, too
        importlib.import_module(module)


def _library() -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise adapting.missing("gymnasium", error) from error
    return gymnasium
