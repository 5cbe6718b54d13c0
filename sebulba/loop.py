"""Sebulba: threads step environments on the host and act on some cores; one thread learns on the others.

      actor thread 0..M-1 (several per actor core)              learner thread (one per host)
    +------------------------------------------+              +-----------------------------------+
    | params of version r - lag  <---------------- ParamStore <--- publish version u + 1          |
    | T x (environments -> core -> action)     |              |                ^                  |
    | trajectory, cut along the batch -------------- Queue -----> update u: one trajectory of     |
    |                                          |              |   every thread, learner_step      |
    +------------------------------------------+              |   under the mesh of learner cores |
                                                              +-----------------------------------+

With a fixed lag every rollout acts with exactly one version and the learner takes trajectories in the order of the
threads, so that a run is repeatable bit for bit, however the threads are scheduled.

After Hessel et al. 2021, "Podracer architectures for scalable reinforcement learning", section 4.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from podracer import hosts, profile, replays
from podracer.envs.host import HostEnvironment
from podracer.errors import check_divides, check_number
from podracer.types import Agent
from sebulba.actor import Actor, ActorPrograms, Rollout, pack
from sebulba.example import example, start, zeros
from sebulba.lag import Lag
from sebulba.learner import Learner
from sebulba.params import ParamStore
from sebulba.queue import Queue
from sebulba.seeds import environment_seeds
from sebulba.threads import Supervisor
from sebulba.topology import Topology
from sebulba.update import Update


class Sebulba:
    """A run's threads and programs. `run` trains; the state is `learner.state`.

    Args:
      agent: any agent.
      env: a host environment; each actor thread starts one batch of it.
      topology: which cores act and which learn.
      unroll_length: T.
      lag: see `Lag`.
      accumulate: trajectories of each thread that form one update.
      learner_splits: learner steps that each update is cut into.
      seed: seed of everything random.
      stall_timeout_s: silence of a thread that ends the run.
    """

    def __init__(
        self,
        agent: Agent,
        env: HostEnvironment,
        topology: Topology,
        unroll_length: int,
        lag: Lag,
        accumulate: int = 1,
        learner_splits: int = 1,
        seed: int = 0,
        stall_timeout_s: float = 120.0,
    ):
        sizes = {"unroll_length": unroll_length, "accumulate": accumulate, "learner_splits": learner_splits}
        for name, value in sizes.items():
            check_number(name, value, minimum=1)
        self.agent, self.env, self.topology = agent, env, topology
        self.unroll_length, self.lag, self.accumulate, self.seed = unroll_length, lag, accumulate, seed
        replays.check_fits(agent, topology.learner_mesh)
        self._stall_timeout_s = stall_timeout_s
        self._key = jax.random.key(seed)
        count = topology.num_threads * accumulate
        self.learner = Learner(agent, topology.learner_mesh, count, learner_splits, self._key)
        self._programs = ActorPrograms(agent, len(topology.learner_cores))
        self._renew()
        self._rollout_steps = unroll_length * env.batch_size
        self.steps_per_update = count * self._rollout_steps * hosts.count()  # over all hosts
        self._num_trajectories, self.learner_splits = count, learner_splits
        self._dropped = self._first_version = 0
        self._rollouts = [0] * topology.num_threads
        check_divides("batch_size per learner core", self._learner_batch, "learner_splits", learner_splits)

    def _describe_queues(self) -> str:
        filled = ", ".join(f"{queue.name} {len(queue)} of {queue.size}" for queue in self._queues)
        return f"Queues: {filled}. {self.learner.updates} updates, newest params {self._store.newest}."

    def _renew(self) -> None:
        """What serves one `run` only."""
        self._queues: list[Queue] = []
        self.supervisor = Supervisor(self._stall_timeout_s, self._describe_queues)
        self._store = ParamStore(self.topology.actor_cores, self.lag.updates + 1, self.supervisor)

    @property
    def _learner_batch(self) -> int:
        """Environments whose trajectories each learner core gets."""
        return self._num_trajectories * self.env.batch_size // len(self.topology.learner_cores)

    def describe(self) -> str:
        """Who acts and who learns, in words."""
        steps = f"{self.steps_per_update:,} steps per update, lag {self.lag}"
        return f"{self.topology.describe(self.env.batch_size, self.unroll_length, self.env.spec.frame_skip)} ({steps})"

    def check(self) -> None:
        """Trace agent and learner without compiling: mistakes in an agent or its environment show here."""
        size = self._learner_batch // self.learner_splits

        def update():
            state = self.agent.initial_learner_state(jax.random.key(0))
            trajectory = example(self.agent, self.env, size, self.unroll_length)
            return self.agent.learner_step(state, trajectory, jax.random.key(0), None)

        jax.eval_shape(update)

    def compile(self) -> Any:
        """Compile all programs, by acting on zeros once on every actor core; returns the compiled update."""
        size, times = self.env.batch_size, self.unroll_length
        self._publish()
        shards: list[Any] = []
        for core in self.topology.actor_cores:
            _, params = self._store.get(core)
            key = jax.device_put(jax.random.fold_in(self._key, 0), core)
            before = jax.device_put(self.agent.initial_actor_state(size), core)
            timestep = start(zeros(self.env.spec.observation, size), size)
            seen, flags = timestep.observation, pack(timestep)
            _, state, _ = self._programs.act(params, before, seen, flags, key, np.uint32(0))
            output, _, seen = self._programs.act(params, state, seen, flags, key, np.uint32(0))
            observations, flags = [seen] * (times + 1), np.stack([flags] * (times + 1))
            parts = self._programs.collect(observations, flags, [output] * times, before)
            shards = [jax.device_put(part, to) for part, to in zip(parts, self.topology.learner_cores, strict=True)]
        return self.learner.compile([shards] * self._num_trajectories)

    def run(
        self,
        num_updates: int,
        on_update: Callable[[Update], bool],
        restarts: int = 0,
        interrupted: Callable[[], bool] = lambda: False,
        last_words: Callable[[list[str]], None] = lambda names: None,
    ) -> None:
        """Train until `num_updates` updates have been made, or `on_update` (called in the learner thread) says stop.

        However it ends, no thread is left and `learner.state` is that after a whole update; another call goes on.

        Args:
          num_updates: counted from the beginning of the run.
          on_update: gets each `Update`; returns True to stop.
          restarts: how often this run was resumed; start states are then new ones.
          interrupted: asked often, in this thread; True stops all threads.
          last_words: gets the names of threads that hang and cannot be stopped, before it ends (status 70 or 73).

        Raises:
          the first exception of any thread.
        """
        if self.supervisor.stopping.is_set():
            self._renew()
        topology, supervisor = self.topology, self.supervisor
        self._first_version = self.learner.updates
        size = self.accumulate * (self.lag.updates + 1)
        queues = self._queues = [Queue(size, supervisor, f"actor-{i}") for i in range(topology.num_threads)]
        devices = [core for core in topology.actor_cores for _ in range(topology.threads_per_core)]
        seeds = environment_seeds(self.seed, restarts, hosts.index(), topology.num_threads, self.env.batch_size)

        def learn():
            self._learn(queues, num_updates, on_update)
            supervisor.stopping.set()

        try:
            for i, device in enumerate(devices):
                key = jax.random.fold_in(jax.random.fold_in(self._key, 2**20 + restarts), hosts.index())
                key = jax.random.fold_in(key, i)
                arguments = (i, device, queues[i], key, seeds[i], num_updates)
                supervisor.start(f"actor-{i}", lambda arguments=arguments: self._act(*arguments))
            supervisor.start("learner", learn)
            while not supervisor.stopping.is_set() and not interrupted():
                supervisor.check()
                time.sleep(0.02)
        finally:
            supervisor.join(last_words)
        supervisor.check()

    def _act(self, thread: int, device: Any, queue: Queue, key: jax.Array, seeds: list[int], num_updates: int) -> None:
        """The body of an actor thread."""
        first = self._first_version
        actor = Actor(
            self.agent, self.env, self._programs, device, self.topology.learner_cores, self.unroll_length, key, seeds
        )
        try:
            for number in range(first * self.accumulate, num_updates * self.accumulate):
                began = time.perf_counter()
                oldest = max(first, number // self.accumulate - self.lag.updates)
                version, params = self._store.get(device, oldest if self.lag.fixed else None, oldest)
                waited = time.perf_counter() - began
                rollout = actor.rollout(version, params, self.supervisor.go_on)
                self._rollouts[thread] += 1
                rollout.waits["params"] = waited
                began = time.perf_counter()
                queue.put(rollout)
                rollout.waits["queue_put"] = time.perf_counter() - began
        finally:
            actor.close()

    def _learn(self, queues: list[Queue], num_updates: int, on_update: Callable[[Update], bool]) -> None:
        """The body of the learner thread, the only one that launches programs over several cores."""
        beat = self.supervisor.beat
        self._publish()
        while self.learner.updates < num_updates:
            clock = time.perf_counter()
            rollouts = [self._take(queue) for _ in range(self.accumulate) for queue in queues]
            got = time.perf_counter()
            beat("learning")
            lags = [self.learner.updates - rollout.version for rollout in rollouts]
            with profile.phase("learning"):
                metrics = jax.device_get(self.learner.update([rollout.shards for rollout in rollouts]))
            learned = time.perf_counter()
            beat("publishing params")
            self._publish()
            waits = {"queue_get": got - clock, "learner_step": learned - got, "publish": time.perf_counter() - learned}
            names = {name for rollout in rollouts for name in rollout.waits}
            waits |= {name: float(np.mean([r.waits.get(name, 0.0) for r in rollouts])) for name in sorted(names)}
            means = {name: float(np.mean(values)) for name, values in metrics.items()}
            # An agent that does not say itself which steps it left out shows them in its other numbers.
            skipped = metrics.get("nonfinite_updates", sum(~np.isfinite(values) for values in metrics.values()))
            means["nonfinite_updates"] = float(np.sum(skipped))
            episodes = [episode for rollout in rollouts for episode in rollout.episodes]
            acted = sum(self._rollouts) * self._rollout_steps
            number = self.learner.updates
            steps = number * self.steps_per_update
            if on_update(Update(number, steps, acted, means, episodes, lags, self._dropped, waits)):
                return

    def _take(self, queue: Queue) -> Rollout:
        """The next trajectory that is not too old."""
        while True:
            rollout = queue.get()
            if self.lag.fixed or self.learner.updates - rollout.version <= self.lag.updates:
                return rollout
            self._dropped += 1

    @profile.phases("publishing")
    def _publish(self) -> None:
        self._store.publish(self.learner.updates, self.learner.state.params)
