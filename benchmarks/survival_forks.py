"""Processes that are quick to start: forks of this one, which has imported everything and started nothing of JAX."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint  # noqa: F401  # so that no child imports it

import anakin
import launch.cli
import launch.commands
from podracer import agents, envs, mesh, networks
from podracer.errors import UserError

CACHE = pathlib.Path(__file__).resolve().parents[1] / ".cache" / "xla"
CALL = 5 * 8 * 20  # steps: unroll, environments, updates


def start(function: Callable[..., Any], *arguments: Any, output: pathlib.Path) -> int:
    """Call `function` in a fork; its output goes to a file; returns its process id. Status 99: an exception."""
    child = os.fork()
    if child:
        return child
    status = 99
    try:
        os.setsid()
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        status = function(*arguments) or 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait(child: int, seconds: float) -> int | None:
    """The status of a fork (negative: the signal that ended it); None: it goes on after so many seconds."""
    until = time.monotonic() + seconds
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            return None
        time.sleep(0.005)


def kill(child: int) -> int:
    """End a fork as nothing else does; its status, which is that of before, where it had ended by itself."""
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def command(line: list[str]) -> int:
    """Run a command line of `podracer` here."""
    _start_jax(None)
    launch.cli.main(line)
    return 0


def train_or_resume(directory: pathlib.Path, cores: int, calls: int, **settings: Any) -> int:
    """A tiny run on Anakin, from its newest checkpoint if there is one; leaves the final state beside it."""
    _start_jax(cores)
    env = envs.Catch(rows=5, columns=3)
    agent = agents.a2c(env.spec, network=networks.mlp((8,)))
    try:
        run = anakin.resume(directory, cores=cores, sinks=[], agent=agent, env=env)
    except UserError as error:
        if "no complete checkpoint" not in str(error) and "no config.json" not in str(error):
            raise
        shutil.rmtree(directory, ignore_errors=True)  # it was killed before its first checkpoint
        sizes = {"batch_per_core": 8 // cores, "unroll_length": 5, "updates_per_call": 20, "evaluations": 2}
        settings = {**sizes, "eval_episodes": 8, "total_steps": calls * CALL, **settings}
        run = anakin.train(agent, env, cores=cores, run_dir=directory, sinks=[], **settings)
    np.savez(directory / "state.npz", *leaves(run.state))
    return 0


def leaves(tree: Any) -> list[np.ndarray]:
    """All leaves as numpy; PRNG keys as their data."""
    is_key = lambda leaf: jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return [np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf) for leaf in jax.tree.leaves(tree)]


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    """Bit for bit."""
    return len(one) == len(other) and all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(one, other))


def _start_jax(cores: int | None) -> None:
    jax.config.update("jax_compilation_cache_dir", str(CACHE))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    if cores is not None:
        mesh.start_backend("cpu", cores)
