"""Mistakes that a user can make and mend: one line each, never a traceback."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable
from typing import Any

from podracer import exits


class UserError(ValueError):
    """Something the user gave cannot work.

    The command line prints the message as one line on stderr and exits with `exit_status`; from Python it is an
    ordinary exception. The message says what was got, what was expected and what to do about it.
    """

    exit_status = exits.BAD_INPUT


class NotSaved(RuntimeError):
    """A run ends because its checkpoints cannot be written; what it learned since the last good one is lost.

    The command line prints the message as one line on stderr and exits with `exit_status`: with more room on the disk
    or other permissions, the run goes on from that checkpoint.
    """

    exit_status = exits.INTERNAL


def brief(error: BaseException) -> str:
    """An exception in one line of at most 300 characters: its kind, and what it says."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    # What a callback raises comes from JAX as a text that ends with the callback's own traceback.
    said = lines[-1] if "Traceback (most recent call last)" in text else lines[0]
    return f"{type(error).__name__}: {said}"[:300]


def closest(name: str, options: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` where an option resembles `name`, else an empty string."""
    found = difflib.get_close_matches(name.lower(), {option.lower(): option for option in options}, n=1, cutoff=0.5)
    by_lower = {option.lower(): option for option in options}
    return f" Did you mean '{by_lower[found[0]]}'?" if found else ""


def unknown(what: str, name: str, options: Iterable[str], do: str) -> UserError:
    """The error for a name that is not one of `options`; `do` says how to see or add more."""
    options = sorted(options)
    return UserError(f"unknown {what} '{name}'.{closest(name, options)} {do}")


def check_number(
    name: str,
    value: Any,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    exclusive: bool = False,
    whole: bool = False,
) -> None:
    """Refuse NaN, infinities and values out of `[minimum, maximum]`, and fractions where `whole`, naming the field.

    Values that are not numbers of Python or numpy (a traced array in a sweep) pass: they were checked before tracing.

    Raises:
      UserError: the value is not usable.
    """
    if not isinstance(value, numbers.Real):
        return
    number = float(value)
    wanted = []
    if minimum is not None:
        wanted.append(f"{'>' if exclusive else '>='} {minimum:g}")
    if maximum is not None:
        wanted.append(f"<= {maximum:g}")
    low_ok = minimum is None or (number > minimum if exclusive else number >= minimum)
    high_ok = maximum is None or number <= maximum
    if not math.isfinite(number) or not (low_ok and high_ok) or (whole and number % 1):
        kind = "whole" if whole else "finite"
        raise UserError(f"{name} is {number:g}; expected a {kind} number {' and '.join(wanted)}. Change {name}.")


def check_divides(name: str, value: int, by_name: str, by: int) -> None:
    """Refuse sizes that do not divide, naming both fields.

    Raises:
      UserError: `by` does not divide `value`.
    """
    if by < 1 or value % by:
        raise UserError(
            f"{name} = {value} does not divide into {by_name} = {by} equal parts. Make {name} a multiple of {by_name}."
        )
