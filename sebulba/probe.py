"""How fast the environments are alone: random actions, from as many threads as the run will have. The ceiling."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from podracer.envs import api
from podracer.envs.host import HostEnvironment


def steps_per_s(env: HostEnvironment, num_threads: int, seconds: float = 1.0) -> float:
    """Environment steps per second of `num_threads` batches, each stepped by a thread with random actions.

    Raises:
      what an environment raised.
    """
    counts, errors = [0] * num_threads, []
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
            while not stop.is_set():
                batch.step(random_actions(env.spec.action, env.batch_size, rng))
                counts[thread] += env.batch_size
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
    began = time.perf_counter()
    try:
        start.wait()
        began = time.perf_counter()
        while time.perf_counter() - began < seconds and not errors:
            time.sleep(0.02)
    except threading.BrokenBarrierError:
        pass
    finally:
        elapsed, total = time.perf_counter() - began, sum(counts)
        stop.set()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return total / elapsed


def random_actions(action: api.Action, batch_size: int, rng: np.random.Generator) -> Any:
    """Uniform actions [B, ...] as agents give them: continuous ones in [-1, 1]."""
    if isinstance(action, api.Discrete):
        return rng.integers(0, action.num_values, batch_size, np.int32)
    if isinstance(action, api.MultiDiscrete):
        return rng.integers(0, np.asarray(action.num_values), (batch_size, len(action.num_values)), np.int32)
    return rng.uniform(-1, 1, (batch_size, action.size)).astype(np.float32)
