"""Parameters by version, on every actor core."""

from __future__ import annotations

import threading
from typing import Any

import jax

from sebulba.threads import Supervisor


class ParamStore:
    """The newest versions of the params, one copy per actor core. Version v is what v learner updates made.

    Args:
      devices: the actor cores.
      keep: how many versions stay: lag + 1.
    """

    def __init__(self, devices: tuple[Any, ...], keep: int, supervisor: Supervisor):
        self._devices, self._keep, self._supervisor = devices, keep, supervisor
        self._versions: dict[int, dict[Any, Any]] = {}
        self._newest = -1
        self._changed = threading.Condition()

    @property
    def newest(self) -> int:
        return self._newest

    def publish(self, version: int, params: Any) -> None:
        """Copy `params` to every actor core; returns when they are there, so that no actor waits on the device."""
        # A copy even on a core that learns too: the learner donates its own at the next update.
        copies = {device: _copy(params, device) for device in self._devices}
        jax.block_until_ready(list(copies.values()))
        with self._changed:
            self._versions[version] = copies
            self._newest = version
            for old in [v for v in self._versions if v <= version - self._keep]:
                del self._versions[old]
            self._changed.notify_all()

    def get(self, device: Any, version: int | None = None, at_least: int = 0) -> tuple[int, Any]:
        """`(version, params)` on `device`: exactly `version`, or the newest where it is None and >= `at_least`.

        Raises:
          Stopped: the run is being stopped.
        """
        wanted = at_least if version is None else version
        with self._changed:
            self._supervisor.wait(self._changed, lambda: self._newest >= wanted, f"waiting for params {wanted}")
            chosen = self._newest if version is None else version
            return chosen, self._versions[chosen][device]


def _copy(params: Any, device: Any) -> Any:
    def one(leaf):
        shard = leaf.addressable_data(0)
        moved = jax.device_put(shard, device)
        return moved.copy() if moved.devices() == shard.devices() else moved

    return jax.tree.map(one, params)
