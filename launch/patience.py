"""Asking again where the cloud or its hosts do not answer.

What was not read says nothing about a slice: it may well train. So nobody deletes it for that, and `CutOff` says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from launch.tools import ToolFailed
from launch.words import say

PATIENCE_S = 1800.0  # how long a question about a slice that may train is asked again
FIRST_WAIT_S, LONGEST_WAIT_S = 5.0, 60.0  # between two tries; each time twice as long

Answer = TypeVar("Answer")


class CutOff(RuntimeError):
    """Nobody knows what has become of a slice."""


def ask(question: Callable[[], Answer]) -> Answer:
    """The answer to a question that may be asked as often as one likes.

    Raises:
      CutOff: there was none for `PATIENCE_S`.
    """
    try:
        return keep_trying(question, PATIENCE_S, final=lambda error: False)
    except ToolFailed as error:
        raise CutOff(
            f"it may still train, but for {PATIENCE_S / 60:.0f} minutes there was no answer: {error}"
        ) from error


def keep_trying(
    action: Callable[[], Answer], for_s: float, final: Callable[[ToolFailed], bool] = lambda error: error.final
) -> Answer:
    """What `action` returns, tried again while it fails, with longer and longer waits.

    Raises:
      ToolFailed: the last failure, where `for_s` is over or where `final` says that trying again does not help.
    """
    began, wait_s = time.monotonic(), FIRST_WAIT_S
    while True:
        try:
            return action()
        except ToolFailed as error:
            if final(error) or time.monotonic() + wait_s > began + for_s:
                raise
            say(f"no answer, trying again in {wait_s:g} s: {error}")
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)
