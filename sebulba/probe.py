"""How fast the environments are alone: random actions, from as many threads as the run will have. The ceiling."""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

import numpy as np

from podracer.envs import api
from podracer.envs.host import HostEnvironment


class Done(NamedTuple):
    """What was done in a while."""

    steps: float  # environment steps: one action of one environment each
    seconds: float
    cpu_s: float  # of this process, all its threads

    @property
    def steps_per_s(self) -> float:
        return self.steps / self.seconds


def steps_per_s(env: HostEnvironment, num_threads: int, seconds: float = 1.0) -> float:
    """Environment steps per second of `num_threads` batches, each stepped by a thread with random actions.

    Raises:
      what an environment raised.
    """
    return measure(env, num_threads, seconds).steps_per_s


def measure(env: HostEnvironment, num_threads: int, seconds: float = 1.0) -> Done:
    """As `steps_per_s`, with the time that was spent.

    Raises:
      what an environment raised.
    """
    rates, errors = [0.0] * num_threads, []
    start, stop = threading.Barrier(num_threads + 1), threading.Event()

    def work(thread: int) -> None:
        try:
            batch = env.start([thread * env.batch_size + i for i in range(env.batch_size)])
        except BaseException as error:
            errors.append(error)
            start.abort()
            return
        try:
            rng = np.random.default_rng(thread)
            batch.reset()
            start.wait()
            began, count = time.perf_counter(), 0
            while not stop.is_set():
                batch.step(random_actions(env.spec.action, env.batch_size, rng))
                count += env.batch_size
            # Each thread by its own clock: a step that is not over at the end would be missing in a short while.
            rates[thread] = count / (time.perf_counter() - began)
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            errors.append(error)
            start.abort()
        finally:
            batch.close()

    threads = [threading.Thread(target=work, args=(i,), name=f"probe-{i}", daemon=True) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    began, cpu = time.perf_counter(), time.process_time()
    try:
        start.wait()
        began, cpu = time.perf_counter(), time.process_time()
        while time.perf_counter() - began < seconds and not errors:
            time.sleep(0.02)
    except threading.BrokenBarrierError:
        pass
    finally:
        elapsed, used = time.perf_counter() - began, time.process_time() - cpu
        stop.set()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return Done(sum(rates) * elapsed, elapsed, used)


def random_actions(action: api.Action, batch_size: int, rng: np.random.Generator) -> Any:
    """Uniform actions [B, ...] as agents give them: continuous ones in [-1, 1]."""
    if isinstance(action, api.Discrete):
        return rng.integers(0, action.num_values, batch_size, np.int32)
    if isinstance(action, api.MultiDiscrete):
        return rng.integers(0, np.asarray(action.num_values), (batch_size, len(action.num_values)), np.int32)
    return rng.uniform(-1, 1, (batch_size, action.size)).astype(np.float32)
