"""A process that is measured: it compiles, says that it is ready, and answers every `go` with one timed block.

One line of JSON each, on standard output: `{"ready": true, "compile_s": ..., "config": ..., "flags": ...}`, then for
every line `go` of standard input `{"steps": ..., "seconds": ..., "steps_per_s": ..., "cpu_seconds": ..., "load": ...}`.
`quit`, or the end of the input, ends it. The other side is `launch/turns.py`.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

NEVER_S = 1e9  # a frozen process is silent for long
PROBE_S = 0.5  # of a run that is long enough to tell how long a block must be

Say = Callable[[dict[str, Any]], None]


def take_stdout() -> Say:
    """Keep standard output for the protocol alone: whatever libraries print goes to standard error."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return lambda message: print(json.dumps(message), file=channel)


def ready(config: dict[str, Any], compile_s: float) -> dict[str, Any]:
    """The first line; `flags` is what this process tells XLA, JAX and libtpu by its environment."""
    flags = {name: value for name, value in os.environ.items() if name.startswith(("XLA_", "JAX_", "LIBTPU_"))}
    return {"ready": True, "compile_s": round(compile_s, 3), "config": config, "flags": flags}


def answer(steps: float, seconds: float, cpu_seconds: float, **more: Any) -> dict[str, Any]:
    """The line of a block."""
    numbers = {"steps": steps, "seconds": seconds, "steps_per_s": steps / seconds, "cpu_seconds": cpu_seconds}
    return {**numbers, "load": os.getloadavg()[0], **more}


def cpu_seconds() -> float:
    """User and system time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def serve_anakin(make_loop: Callable[[], Any], config: dict[str, Any], seconds: float, say: Say) -> None:
    """Train in blocks of about `seconds`, always of the same number of calls; 0: of one call.

    With several hosts the first one says how many calls those are.
    """
    import jax

    from podracer import hosts

    start = time.perf_counter()  # imports and the start of the backend are behind us
    loop = make_loop()
    state = loop.init(seed=0)
    loop.compile()
    compile_s = time.perf_counter() - start
    hosts.gather("compiled", True)  # CPUs that meet for the first time wait for each other for 30 seconds only

    def run(calls: int) -> float:
        nonlocal state
        begin = time.perf_counter()
        for _ in range(calls):
            state, metrics = loop.step(state)
        jax.block_until_ready(metrics)
        return time.perf_counter() - begin

    run(1)
    calls = 1
    if seconds:
        elapsed = hosts.from_first("length of a block", run(1))
        while elapsed < min(PROBE_S, seconds):
            calls *= 2
            elapsed = hosts.from_first("length of a block", run(calls))
        calls = max(1, round(calls * seconds / elapsed))
    say(ready(config, compile_s))
    for line in sys.stdin:
        command = line.strip()
        if command == "quit":
            break
        if command == "go":
            cpu, elapsed = cpu_seconds(), run(calls)
            say(answer(calls * loop.steps_per_call, elapsed, cpu_seconds() - cpu))


def serve_sebulba(make_loop: Callable[[], Any], config: dict[str, Any], seconds: float, say: Say) -> None:
    """Train in blocks of whole updates, at least one, the first one when it is asked for.

    It goes on by itself between two blocks: whoever drives it stops the process meanwhile (SIGSTOP), so that the queues
    are as full at the start of a block as at its end.
    """
    from podracer import hosts
    from sebulba import measure

    start = time.perf_counter()
    loop = make_loop()
    loop.compile()
    compile_s = time.perf_counter() - start
    hosts.gather("compiled", True)

    def between(block: Any) -> bool:
        if block is None:
            say(ready(config, compile_s))
        else:
            done = block.done
            say(answer(done.steps, done.seconds, done.cpu_s, updates=block.updates, waits=block.waits))
        return sys.stdin.readline().strip().startswith("go")

    measure.blocks(loop, seconds, between)


def serve(make_measures: Callable[[], Any], config: dict[str, Any], seconds: float, say: Say) -> None:
    """Answer `go WHAT` with a measurement.

    Args:
      make_measures: returns, by what they measure, functions of a length in seconds that return `sebulba.probe.Done`.
    """
    start = time.perf_counter()
    measures = make_measures()
    say(ready(config, time.perf_counter() - start))
    for line in sys.stdin:
        command, _, what = line.strip().partition(" ")
        if command == "quit":
            break
        done = measures[what](seconds)
        say(answer(done.steps, done.seconds, done.cpu_s))
