"""Speed of Sebulba and of its parts, each alone: what `podracer bench` and the benchmark scripts measure with.

A rate of training is counted over whole updates, from the end of one to the end of another, after the first ones:
compilation, the start of the environments and the filling of the queues are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from podracer import hosts
from podracer.envs.host import HostEnvironment
from sebulba import probe
from sebulba.actor import Actor, ActorPrograms, pack
from sebulba.loop import Sebulba
from sebulba.probe import Done
from sebulba.update import Update

WITHOUT_LIMIT = 2**31  # updates
PROBE_UPDATES = 3  # that tell several hosts how long one takes


class Trained(NamedTuple):
    """Whole updates."""

    done: Done
    updates: int
    waits: dict[str, float]  # seconds per update by what they were spent on, as in `Update`


def blocks(loop: Sebulba, seconds: float, between: Callable[[Trained | None], bool]) -> None:
    """Train in blocks of whole updates, at least one and `seconds` long; programs are compiled before.

    Several hosts learn together, so that their blocks must be equally many updates: the first host says how many take
    about `seconds`.

    Args:
      loop: what trains; its state goes on.
      seconds: length of a block.
      between: called in the learner thread with None before the first block and then with each; returns whether
        another one follows. Time that passes in it is not counted, but the actors go on until the queues are full.

    Raises:
      the first exception of any thread.
    """
    probe_from = loop.learner.updates + loop.lag.updates + 1
    warm = probe_from + (PROBE_UPDATES if hosts.count() > 1 else 0)
    began, cpu, waits, length = 0.0, 0.0, [], None

    def over(elapsed: float) -> bool:
        return elapsed >= seconds if length is None else len(waits) >= length

    def take(update: Update) -> bool:
        nonlocal began, cpu, waits, length
        if update.number > warm:
            waits.append(update.waits)
            elapsed, used = time.perf_counter() - began, time.process_time() - cpu
            if not over(elapsed):
                return False
            means = {name: float(np.mean([wait[name] for wait in waits])) for name in waits[0]}
            done = Done(len(waits) * loop.steps_per_update, elapsed, used)
            follows = between(Trained(done, len(waits), means))
        elif update.number == warm:
            if hosts.count() > 1:
                per_update = (time.perf_counter() - began) / PROBE_UPDATES
                length = hosts.from_first("length of a block", max(1, round(seconds / per_update)))
            follows = between(None)
        else:
            if update.number == probe_from:
                began = time.perf_counter()
            return False
        began, cpu, waits = time.perf_counter(), time.process_time(), []
        return not follows

    loop.run(WITHOUT_LIMIT, take)


def training(loop: Sebulba, seconds: float) -> Trained:
    """One block of a run of its own. Raises what `blocks` does."""
    found = []
    blocks(loop, seconds, lambda block: block is None or found.append(block) is not None)
    return found[0]


class Inference:
    """The acting program alone: a batch after the other on the first actor core, the action fetched to the host."""

    def __init__(self, loop: Sebulba):
        core, size = loop.topology.actor_cores[0], loop.env.batch_size
        self._act, self._size = ActorPrograms(loop.agent, 1).act, size
        batch = loop.env.start(list(range(size)))
        timestep = batch.reset().timestep
        batch.close()
        # A copy: the pool that the observation came from is closed.
        self._observation = jax.tree.map(np.array, timestep.observation)
        self._flags, self._key = pack(timestep), jax.device_put(jax.random.key(0), core)
        self._state = jax.device_put(loop.agent.initial_actor_state(size), core)
        self._params = _on(core, loop.learner.state.params)
        self._once()

    def __call__(self, seconds: float) -> Done:
        return _repeat(self._once, self._size, seconds)

    def _once(self) -> None:
        args = (self._params, self._state, self._observation, self._flags, self._key, np.uint32(0))
        output, self._state, _ = self._act(*args)
        jax.tree.map(np.asarray, output.action)


class Learning:
    """The update alone, on the trajectories of one rollout, again and again."""

    def __init__(self, loop: Sebulba):
        topology, size = loop.topology, loop.env.batch_size
        core, programs = topology.actor_cores[0], ActorPrograms(loop.agent, len(topology.learner_cores))
        seeds, key = list(range(size)), jax.random.key(0)
        actor = Actor(loop.agent, loop.env, programs, core, topology.learner_cores, loop.unroll_length, key, seeds)
        params = _on(core, loop.learner.state.params)
        shards = actor.rollout(0, params, lambda doing: None).shards
        actor.close()
        self._loop, self._batches = loop, [shards] * (topology.num_threads * loop.accumulate)
        loop.learner.compile(self._batches)
        self._once()

    def __call__(self, seconds: float) -> Done:
        return _repeat(self._once, self._loop.steps_per_update, seconds)

    def _once(self) -> None:
        jax.device_get(self._loop.learner.update(self._batches))


def ceiling(env: HostEnvironment, num_threads: int, seconds: float) -> Done:
    """The environments alone: random actions, from as many threads as the run has."""
    return probe.measure(env, num_threads, seconds)


def _repeat(once: Callable[[], None], steps: int, seconds: float) -> Done:
    began, cpu, times = time.perf_counter(), time.process_time(), 0
    while True:
        once()
        times += 1
        elapsed = time.perf_counter() - began
        if elapsed >= seconds:
            return Done(times * steps, elapsed, time.process_time() - cpu)


def _on(core: Any, params: Any) -> Any:
    """A copy of the learner's params, which it will donate."""
    return jax.device_put(jax.tree.map(lambda leaf: np.array(leaf.addressable_data(0)), params), core)
