"""How the processes of a run end: together where all is well, at once and with a reason where it is not.

Left alone, JAX keeps a process that failed in a barrier at exit, alive for all heartbeats, while the others wait for it
in a collective: for minutes. Here whoever fails says so under one key and leaves; a thread on every host waits for that
key, and ends a program that is blocked.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
import traceback
from typing import Any, NoReturn

import jax

from podracer import exits, watchdog
from podracer.errors import brief
from podracer.service import POLL_MS, PeerLost, left, state

FAILED = "podracer/failed"
GRACE_S = 1.0  # for a program to see by itself what ended another host
FAREWELL_S = 3.0  # for the others to say what they see and to end, before the first host takes the service away
# What errors of a broken collective or of the coordination service say.
BROKEN = ("Gloo", "onnection reset", "onnection closed", "oordination", "heartbeat", "UNAVAILABLE", "Socket closed")

_watching = watchdog.flag()  # set: nobody watches the others any more
_polls, _manager = 0, None
_lines: dict[int, socket.socket] = {}  # of the first host to all, of the others to the first


def prepare(lines: dict[int, socket.socket]) -> None:
    """To be called once the hosts are connected; `lines` are the connections of the roll call."""
    _take_manager()
    _lines.update(lines)
    sys.excepthook = _end_all
    watchdog.beside(_watch, "hosts")
    watchdog.beside(_listen, "lines")


def preempted() -> bool:
    """Whether a host was told to end (SIGTERM), and this is the moment at which all of them stop.

    All hosts must call it equally often, at the same points of the program: once one has had its signal, JAX lets them
    agree in the background on a call that none has reached yet.
    """
    global _polls
    if state().num_processes == 1:
        return False
    _take_manager()
    _polls += 1
    return _manager is not None and _manager.reached_sync_point(_polls)


def _take_manager() -> None:
    """Be the only one who asks JAX's manager: Orbax does so too, with numbers of its own, when it saves."""
    global _manager
    if _manager is None:
        _manager, state().preemption_sync_manager = state().preemption_sync_manager, None


def is_lost_peer(error: BaseException) -> bool:
    """Whether this is what one sees of another host's end: a collective or the coordination service broke off."""
    if isinstance(error, PeerLost):
        return True
    several = state().num_processes > 1
    return several and isinstance(error, jax.errors.JaxRuntimeError) and any(word in str(error) for word in BROKEN)


def why_lost(error: BaseException) -> str:
    """Which host is gone and what it said, if it is heard of now that a collective with it has broken off."""
    with contextlib.suppress(Exception):
        return state().client.blocking_key_value_get(FAILED, int(1000 * GRACE_S))
    time.sleep(GRACE_S)  # where it is the first host, `_watch` ends this process meanwhile
    return f"another host of this run is gone, and its own output says why ({brief(error)})"


def leave(status: int, why: str = "") -> NoReturn:
    """End this process without waiting for the other hosts, and tell them why. The first host leaves last."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    _watching.set()
    client, mine = state().client, state().process_id
    if status:
        with contextlib.suppress(Exception):  # only the first failure is kept
            client.key_value_set(FAILED, f"host {mine} has failed with status {status}: {why}")
    with contextlib.suppress(Exception):
        if mine > 0:
            client.key_value_set(left(mine), str(status))
        else:
            _await_ends(client, time.monotonic() + FAREWELL_S)
    os._exit(status)


def disconnect() -> None:
    """Leave together with the other hosts, at the end of a run that went well on all of them."""
    global _manager
    if jax.distributed.is_initialized() and state().num_processes > 1 and not _watching.is_set():
        _watching.set()
        time.sleep(POLL_MS / 1000 + 0.1)  # until the watcher's question is answered: JAX would cut it off, with a noise
        if _manager is not None:
            _manager.shutdown()
            _manager = None
        jax.distributed.shutdown()


def _await_ends(client: Any, deadline: float) -> None:
    """On the first host: until all others have ended, or the time is up.

    That they say so is not enough: JAX aborts a process that lives on for a moment after the service is gone, and its
    own status is lost. The kernel closes the connections of one that has ended.
    """
    seconds_left = lambda: max(deadline - time.monotonic(), 0.001)
    for host in set(range(1, state().num_processes)) - set(_lines):
        client.blocking_key_value_get(left(host), int(1000 * seconds_left()))
    there = list(_lines.values())
    while there and (closed := select.select(there, [], [], seconds_left())[0]):
        there = [connection for connection in there if connection not in closed]


def _end_all(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """For a program of the user's: an exception that nobody caught ends this process at once, and so the others."""
    if issubclass(kind, KeyboardInterrupt):
        leave(exits.INTERRUPTED, "Ctrl-C")
    traceback.print_exception(kind, error, trace)
    leave(exits.PEER_LOST if is_lost_peer(error) else getattr(error, "exit_status", exits.INTERNAL), brief(error))


def _watch() -> None:
    """Runs beside the program, which may be blocked in a collective: ends it soon after another host has failed."""
    while not _watching.is_set():
        try:
            text = state().client.blocking_key_value_get(FAILED, POLL_MS)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                continue
            text = f"the first host is gone: {brief(error)}"
        if not _watching.wait(GRACE_S):
            print(f"podracer: {text}; this one stops", file=sys.stderr, flush=True)
            leave(exits.PEER_LOST)


def _listen() -> None:
    """Runs beside the program: says for the hosts whose connections the kernel closes that they are gone."""
    left_to = dict(_lines)
    while left_to and not _watching.is_set():
        select.select(list(left_to.values()), [], [])  # nobody sends anything: it is the end of one
        for host, connection in list(left_to.items()):
            if select.select([connection], [], [], 0)[0]:
                del left_to[host]
                if not _watching.is_set():
                    _gone(host)


def _gone(host: int) -> None:
    """A host has ended; whatever it said before counts more than this."""
    text = f"host {host} has ended without a word (killed, or out of memory?)"
    if host > 0:
        with contextlib.suppress(Exception):
            state().client.key_value_set(FAILED, text)
    else:  # it carried the messages, and JAX is about to abort this process
        print(f"podracer: {text}; this one stops", file=sys.stderr, flush=True)
        os._exit(exits.PEER_LOST)
