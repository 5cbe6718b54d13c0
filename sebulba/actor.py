"""An actor thread: steps a batch of host environments, acts on one core, sends trajectories to the learner cores.

    host      step environments -> observation           ... rewards and flags stay here until the unroll ends
                     |                    ^
    core      actor_step -> action -------+              ... observations and outputs stay here until then

Then one program stacks the unroll on the actor core and cuts it along the batch, and each part goes straight to its
learner core.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer import profile
from podracer.envs.host import HostEnvironment, HostStep
from podracer.types import Agent, TimeStep, Trajectory


class Episode(NamedTuple):
    """A finished game."""

    score: float
    length: int


class Rollout(NamedTuple):
    """What an actor thread hands to the learner."""

    shards: list[Any]  # one Trajectory [T + 1, B / L, ...] per learner core, on that core
    version: int  # of the params that acted
    number: int  # how many rollouts this thread had made before
    episodes: list[Episode]
    waits: dict[str, float]  # seconds of this rollout by what they were spent on


class ActorPrograms:
    """The two compiled functions of acting; all threads share them.

    Args:
      agent: any agent.
      num_shards: learner cores.
    """

    def __init__(self, agent: Agent, num_shards: int):
        self._agent, self._num_shards = agent, num_shards
        self.act = jax.jit(self._act)
        self.collect = jax.jit(self._collect)

    def _act(self, params, actor_state, observation, flags, key, number):
        """`(output, actor state, observation)`: the observation comes from the host and stays on the core.

        As an argument of a compiled program it gets there ten times as fast as by `device_put`, in Python's time.
        """
        timestep = _timestep(observation, flags)
        return *self._agent.actor_step(params, actor_state, timestep, jax.random.fold_in(key, number)), observation

    def _collect(self, observations, flags, outputs, actor_state):
        """Lists of T + 1 observations and T outputs, flags [T + 1, 4, B] -> one trajectory per learner core."""
        stack = lambda items: jax.tree.map(lambda *leaves: jnp.stack(leaves), *items)
        timestep = _timestep(stack(observations), jnp.moveaxis(flags, 1, 0))
        trajectory = Trajectory(timestep, stack(outputs), actor_state)
        return [cut(trajectory, shard, self._num_shards) for shard in range(self._num_shards)]


def cut(trajectory: Trajectory, part: int, parts: int) -> Trajectory:
    """Part number `part` of `parts` along the batch."""

    def along(axis):
        def one(leaf):
            size = leaf.shape[axis] // parts
            return jax.lax.slice_in_dim(leaf, part * size, (part + 1) * size, axis=axis)

        return one

    return Trajectory(
        jax.tree.map(along(1), trajectory.timestep),
        jax.tree.map(along(1), trajectory.actor_output),
        jax.tree.map(along(0), trajectory.actor_state),
    )


def pack(timestep: TimeStep) -> np.ndarray:
    """Reward, discount, first and valid as one float32 array [4, B]: one transfer instead of four."""
    return np.stack([np.asarray(leaf, np.float32) for leaf in timestep[1:]])


def _timestep(observation: Any, flags: jax.Array) -> TimeStep:
    return TimeStep(observation, flags[0], flags[1], flags[2] > 0, flags[3] > 0)


class Actor:
    """One actor thread's work.

    Args:
      agent, env: what acts, and on what.
      programs: compiled functions, shared by all threads.
      device: the actor core.
      learner_cores: where the parts of a trajectory go.
      key: this thread's PRNG key.
      seeds: one per environment.
    """

    def __init__(
        self,
        agent: Agent,
        env: HostEnvironment,
        programs: ActorPrograms,
        device: Any,
        learner_cores: tuple[Any, ...],
        unroll_length: int,
        key: jax.Array,
        seeds: list[int],
    ):
        self._programs, self._device, self._learner_cores = programs, device, learner_cores
        self._unroll_length = unroll_length
        self._key = jax.device_put(key, device)
        self._batch = env.start(seeds)
        self._actor_state = jax.device_put(agent.initial_actor_state(env.batch_size), device)
        self._scores, self._lengths = np.zeros(env.batch_size), np.zeros(env.batch_size, np.int64)
        self._last: HostStep | None = None
        self._rollouts = 0

    def rollout(self, version: int, params: Any, go_on: Callable[[str], None]) -> Rollout:
        """T decisions with these params. `go_on` is called at each, and raises where the run is being stopped."""
        waits: dict[str, float] = {"environment": 0.0, "inference": 0.0, "transfer": 0.0}
        clock = time.perf_counter()

        def lap(name: str) -> None:
            nonlocal clock
            now = time.perf_counter()
            waits[name] += now - clock
            clock = now

        step = self._batch.reset() if self._last is None else self._last
        key = jax.random.fold_in(self._key, self._rollouts)
        before, episodes = self._actor_state, []
        flags = [pack(step.timestep)]
        observations, outputs = [], []
        lap("environment")
        for number in range(self._unroll_length):
            go_on("acting")
            with profile.phase("acting"):
                output, self._actor_state, observation = self._programs.act(
                    params, self._actor_state, step.timestep.observation, flags[-1], key, np.uint32(number)
                )
                observations.append(observation)
                outputs.append(output)
                action = jax.tree.map(np.asarray, output.action)  # waits for the core
            lap("inference")
            with profile.phase("environment"):
                step = self._batch.step(action)
                self._count(step, episodes)
            lap("environment")
            flags.append(pack(step.timestep))
        self._last = step
        observations.append(jax.device_put(step.timestep.observation, self._device))
        parts = self._programs.collect(observations, np.stack(flags), outputs, before)
        shards = [jax.device_put(part, core) for part, core in zip(parts, self._learner_cores, strict=True)]
        # Before the lists go: the host's observation buffers may be aliased by the device arrays on a CPU.
        jax.block_until_ready(shards)
        lap("transfer")
        self._rollouts += 1
        return Rollout(shards, version, self._rollouts - 1, episodes, waits)

    def close(self) -> None:
        """Close the environments."""
        self._batch.close()

    def _count(self, step: HostStep, episodes: list[Episode]) -> None:
        self._scores += step.score
        self._lengths += step.timestep.valid
        for index in np.flatnonzero(step.game_over):
            episodes.append(Episode(float(self._scores[index]), int(self._lengths[index])))
        self._scores[step.game_over] = 0.0
        self._lengths[step.game_over] = 0
