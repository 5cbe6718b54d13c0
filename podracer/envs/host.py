"""Environments on the host: the protocol that Sebulba's actor threads step, and the bridge from jittable ones.

A host environment is a recipe for batches. Each actor thread starts one batch of its own, with one seed per
environment, steps it with numpy arrays and closes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

import jax
import numpy as np

from podracer.envs import api
from podracer.envs.batch import Batch
from podracer.errors import UserError, check_number
from podracer.types import TimeStep


class HostStep(NamedTuple):
    """What a batch says after a step. Arrays are numpy, and are not written to again."""

    timestep: TimeStep  # [B, ...] what agents learn from: clipped rewards, life loss as an end, where so configured
    score: np.ndarray  # [B] float32, what is reported: the game's own reward of this step
    game_over: np.ndarray  # [B] bool, a whole game ended with this step; the score's sum starts again


class HostBatch(Protocol):
    """B running environments. One thread uses it at a time."""

    def reset(self) -> HostStep:
        """Start all episodes. Called once, first."""
        ...

    def step(self, action: np.ndarray) -> HostStep:
        """Act once in every environment. `action` [B, ...]."""
        ...

    def close(self) -> None:
        """Let go of threads and processes."""
        ...


class HostEnvironment(Protocol):
    """A recipe for batches."""

    @property
    def spec(self) -> api.Spec: ...

    @property
    def batch_size(self) -> int:
        """Environments per batch, B."""
        ...

    def start(self, seeds: Sequence[int]) -> HostBatch:
        """A batch whose environments have these seeds [B]."""
        ...


# A host environment that can be drawn also has `start_drawn(seed) -> HostBatch` of one environment, and that batch
# `render() -> uint8 [height, width, 3]` (numpy).


def host_time_step(
    observation: Any, reward: np.ndarray, discount: np.ndarray, first: np.ndarray, valid: np.ndarray
) -> TimeStep:
    """A `TimeStep` of numpy arrays: the record is the same on the host, only its declared types are JAX's."""
    return TimeStep(observation, *cast(Any, (reward, discount, first, valid)))


class ResetTracker:
    """Time steps of a batch that resets itself in the step after an end (envpool, Gymnasium's NEXT_STEP).

    The one place that knows which step is a reset: the one after `terminated` or `truncated`.
    """

    def __init__(self, batch_size: int):
        self._over = np.zeros(batch_size, bool)

    def first(self, observation: Any) -> TimeStep:
        """The time step of the first reset."""
        size = self._over.shape[0]
        zeros, ones = np.zeros(size, np.float32), np.ones(size, np.float32)
        return host_time_step(observation, zeros, ones, np.ones(size, bool), np.zeros(size, bool))

    def add(self, observation: Any, reward: np.ndarray, terminated: np.ndarray, truncated: np.ndarray) -> TimeStep:
        """The time step after an action, with resets marked and their rewards and ends ignored."""
        reset = self._over
        terminated = terminated & ~reset
        self._over = terminated | (truncated & ~reset)
        reward = np.where(reset, np.float32(0), reward).astype(np.float32)
        return host_time_step(observation, reward, (~terminated).astype(np.float32), reset, ~reset)


@dataclasses.dataclass(frozen=True)
class OnHost:
    """A jittable environment as a host environment: compiled on the CPU, stepped from Python."""

    env: Any
    batch_size: int = 64

    def __post_init__(self):
        check_number("batch_size", self.batch_size, minimum=1)
        if not isinstance(self.env, Batch):
            object.__setattr__(self, "env", Batch(self.env))

    @property
    def spec(self) -> api.Spec:
        return self.env.spec

    def start(self, seeds: Sequence[int]) -> HostBatch:
        if len(seeds) != self.batch_size:
            raise UserError(
                f"{self.spec.name}: {len(seeds)} seeds for {self.batch_size} environments; expected as many."
            )
        return _Bridge(self.env, np.asarray(seeds, np.uint32))


class _Bridge:
    """A `Batch` on one CPU device."""

    def __init__(self, batch: Batch, seeds: np.ndarray):
        self._device = jax.local_devices(backend="cpu")[0]
        self._seeds, self._steps = jax.device_put(seeds, self._device), 0
        self._init, self._step = _compiled(batch)
        self._state: Any = None

    def reset(self) -> HostStep:
        self._state, timestep = self._init(self._seeds)
        return self._host(timestep)

    def step(self, action: Any) -> HostStep:
        self._steps += 1
        action = jax.device_put(action, self._device)
        self._state, timestep = self._step(self._state, action, self._seeds, np.uint32(self._steps))
        return self._host(timestep)

    def close(self) -> None:
        self._state = None

    def _host(self, timestep: TimeStep) -> HostStep:
        timestep = jax.tree.map(np.asarray, timestep)
        # Next-step mode says in its state that an episode is over; same-step mode by a first observation at once.
        game_over = np.asarray(self._state.over) | (timestep.first & timestep.valid)
        return HostStep(timestep, np.where(timestep.valid, timestep.reward, np.float32(0)), game_over)


_CACHE: dict[Any, tuple[Batch, Any, Any]] = {}


def _compiled(batch: Batch) -> tuple[Any, Any]:
    """`init` and `step` of a batch, compiled once for all threads."""
    try:
        key: Any = (hash(batch), batch)
    except TypeError:  # an environment with a dict in it, its spec for instance: known by identity
        key = id(batch)
    if key not in _CACHE:

        def keys(seeds):
            return jax.vmap(jax.random.key)(seeds)

        def step(state, action, seeds, number):
            return batch.step(state, action, jax.vmap(jax.random.fold_in, (0, None))(keys(seeds), number))

        _CACHE[key] = batch, jax.jit(lambda seeds: batch.init(keys(seeds))), jax.jit(step)
    return _CACHE[key][1:]


def is_host(env: Any) -> bool:
    """Whether `env` is a host environment (a recipe with `start`), rather than one that can be compiled."""
    return callable(getattr(env, "start", None)) and hasattr(env, "batch_size")


def jittable(env: Any) -> Any:
    """`env`, if it can be compiled: Anakin asks this of what it is given.

    Raises:
      UserError: it is a host environment.
    """
    if is_host(env):
        name = env.spec.name
        raise UserError(f"{name} runs on the host; use: podracer train sebulba --env {name}")
    return env


def on_host(env: Any, batch_size: int = 64) -> Any:
    """`env` as a host environment with `batch_size` environments per actor thread.

    Args:
      env: a host environment, which is returned with this batch size; an environment that can be compiled; or a
        `Batch` of one.
      batch_size: B.
    """
    if not is_host(env):
        return OnHost(env, batch_size)
    if dataclasses.is_dataclass(env):
        return dataclasses.replace(env, batch_size=batch_size)  # type: ignore
    if env.batch_size != batch_size:
        raise UserError(
            f"{env.spec.name} has batches of {env.batch_size}, expected {batch_size}; make it a dataclass with a "
            "field batch_size, or ask for the same number."
        )
    return env
