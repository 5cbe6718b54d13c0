"""How old the params that act may be."""

from __future__ import annotations

from typing import NamedTuple

from podracer.errors import UserError


class Lag(NamedTuple):
    """How old the params that act may be.

    Attributes:
      updates: learner updates between acting and learning: exactly (fixed), or at most.
      fixed: each rollout waits for its own version; otherwise it takes the newest, and too old ones are dropped.
    """

    updates: int
    fixed: bool

    def __str__(self) -> str:
        return f"{'fixed' if self.fixed else 'bounded'}:{self.updates}" if self.updates or not self.fixed else "sync"

    @staticmethod
    def parse(text: str) -> Lag:
        """`sync`, `fixed`, `fixed:K` or `bounded:K`.

        Raises:
          UserError: it is none of these.
        """
        kind, _, number = text.replace(" ", ":").partition(":")
        if kind == "sync" and not number:
            return Lag(0, True)
        if kind in ("fixed", "bounded") and (number.isdigit() or (kind == "fixed" and not number)):
            lag = Lag(int(number or 1), kind == "fixed")
            if lag.fixed or lag.updates >= 1:
                return lag
        raise UserError(f"lag is '{text}'; expected sync, fixed, fixed:K, or bounded:K with K >= 1.")
