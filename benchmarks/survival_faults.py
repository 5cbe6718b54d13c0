"""What goes wrong in parts b and h of `survival.py`, as a file of a user's: Catch and IMPALA with a fault on one host.

The environment variables FAULT (raise, exit, hang), FAULT_WHERE (environment, policy, learner) and FAULT_HOST say
which; FAULT_FILE is made just before.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import time

import jax
import numpy as np
import survival_signal
from jax.experimental import io_callback

from podracer import agents, envs, hosts, networks

TEXT = "the fault of this benchmark"
AFTER = 400  # calls
STATUS = 139  # of a process that crashes


def signalled() -> envs.Catch:
    """Catch; SIGUSR1 raises an exception in the process that gets it."""
    survival_signal.listen()
    return envs.Catch(rows=5, columns=3)


class Fault:
    """Happens in the 400th call, where this is its place."""

    def __init__(self, where: str):
        self._where = where
        self._calls = 0

    def __call__(self) -> None:
        self._calls += 1
        asked = (os.environ.get("FAULT_WHERE"), os.environ.get("FAULT_HOST"))
        if asked != (self._where, str(hosts.index())) or self._calls != AFTER:
            return
        pathlib.Path(os.environ["FAULT_FILE"]).touch()
        fault = os.environ["FAULT"]
        if fault == "raise":
            raise ValueError(TEXT)
        if fault == "exit":
            os._exit(STATUS)
        time.sleep(10**6)


class FaultyCatch:
    """Catch on the host."""

    def __init__(self) -> None:
        self._inner = envs.on_host(envs.Catch(rows=5, columns=3), batch_size=8)

    spec = property(lambda self: self._inner.spec)
    batch_size = property(lambda self: self._inner.batch_size)

    def start(self, *arguments, **options):
        """One batch of it."""
        return FaultyBatch(self._inner.start(*arguments, **options))


class FaultyBatch:
    """A batch of Catch."""

    def __init__(self, inner):
        self._inner, self._fault = inner, Fault("environment")

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def step(self, action):
        """Steps, until it does not."""
        self._fault()
        return self._inner.step(action)


def faulty_impala(spec):
    """IMPALA with calls from its compiled programs to this host."""
    agent = agents.impala(spec, network=networks.mlp((8,)))
    policy, learner = Fault("policy"), Fault("learner")

    def actor_step(params, actor_state, timestep, key):
        output, state = agent.actor_step(params, actor_state, timestep, key)
        return output._replace(action=output.action + _called(policy, output.action[0])), state

    def learner_step(state, trajectory, key, axis_name):
        state, metrics = agent.learner_step(state, trajectory, key, axis_name)
        return state, metrics | {"called": _called(learner, trajectory.actor_output.action[0, 0]).astype(np.float32)}

    return dataclasses.replace(agent, name="faulty_impala", actor_step=actor_step, learner_step=learner_step)


def _called(fault: Fault, number):
    """0, after a call from the compiled program."""

    def call(_):
        fault()
        return np.int32(0)

    return io_callback(call, jax.ShapeDtypeStruct((), np.int32), number)
