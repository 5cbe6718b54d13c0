"""A bounded queue between one actor thread and the learner, whose waits can be stopped."""

from __future__ import annotations

import collections
import threading
from typing import Any

from sebulba.threads import Supervisor


class Queue:
    """First in, first out, at most `size` items: a learner that is behind makes its actors wait."""

    def __init__(self, size: int, supervisor: Supervisor, name: str):
        self._items: collections.deque = collections.deque()
        self.size, self._supervisor, self.name = size, supervisor, name
        self._changed = threading.Condition()

    def put(self, item: Any) -> None:
        """Add an item, waiting for room.

        Raises:
          Stopped: the run is being stopped.
        """
        with self._changed:
            full = f"waiting for room in queue {self.name}"
            self._supervisor.wait(self._changed, lambda: len(self._items) < self.size, full)
            self._items.append(item)
            self._changed.notify_all()

    def get(self) -> Any:
        """Take the oldest item, waiting for one.

        Raises:
          Stopped: the run is being stopped.
        """
        with self._changed:
            empty = f"waiting for an item of queue {self.name}"
            self._supervisor.wait(self._changed, lambda: len(self._items) > 0, empty)
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def __len__(self) -> int:
        return len(self._items)
