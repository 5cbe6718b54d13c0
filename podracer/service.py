"""JAX's coordination service, by which the hosts of a run tell each other small things, as JSON.

It needs no compilation and no order among collectives, and works from any thread. What JAX knows of the hosts, and this
service, have no public name yet: this file and `podracer/endings.py` use them.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Callable
from typing import Any

import jax

POLL_MS = 500

_rounds: collections.Counter[str] = collections.Counter()  # of each name, how often it was come to


class PeerLost(RuntimeError):
    """Another host of this run is gone."""


def state() -> Any:
    """JAX's `process_id`, `num_processes`, `client` and more; asking for them does not start its backend."""
    from jax._src import distributed

    return distributed.global_state


def next_number(name: str) -> int:
    """How often this host has come to that name, with this time: what is told under it is numbered."""
    _rounds[name] += 1
    return _rounds[name]


def tell(name: str, number: int, value: Any) -> None:
    """Tell all hosts something of that name and number."""
    _asking(lambda: state().client.key_value_set(_key(name, number, state().process_id), json.dumps(value)))


def hear(name: str, number: int, host: int, between: Callable[[], None] = lambda: None) -> Any:
    """What a host tells under that name and number, waiting for it; `between` is called again and again.

    Raises:
      PeerLost: the host, or the first one, is gone.
    """
    while True:
        between()
        try:
            return json.loads(_asking(lambda: state().client.blocking_key_value_get(_key(name, number, host), POLL_MS)))
        except TimeoutError:
            _check_there(host)


def forget(name: str, number: int, host: int) -> None:
    """What was told is needed no more."""
    _asking(lambda: state().client.key_value_delete(_key(name, number, host)))


def left(host: int) -> str:
    """The key under which a host says with which status it ends."""
    return f"podracer/left/{host}"


def _key(name: str, number: int, host: int) -> str:
    return f"podracer/{name}/{number}/{host}"


def _check_there(host: int) -> None:
    """Raise where the host has said that it ends; its heartbeat alone would show that later."""
    try:
        status = state().client.key_value_try_get(left(host))
    except jax.errors.JaxRuntimeError:
        return  # it has said nothing
    raise PeerLost(f"host {host} has left with status {status}")


def _asking(call: Callable[[], Any]) -> Any:
    """A call of the service, with its errors told apart."""
    try:
        return call()
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            raise TimeoutError from error
        raise PeerLost(str(error).splitlines()[0]) from error
