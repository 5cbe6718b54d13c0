"""Joining threads that take their time."""

from __future__ import annotations

import os
import threading
import time

import pytest

from sebulba import threads
from sebulba.threads import Supervisor


class Left(Exception):
    """Instead of the end of the process."""


@pytest.fixture
def leaves(monkeypatch):
    def leave(status):
        raise Left(status)

    monkeypatch.setattr(os, "_exit", leave)


def working(seconds: float) -> tuple[Supervisor, threading.Event]:
    """A supervisor with one thread that works for so long without listening."""
    supervisor, done = Supervisor(), threading.Event()

    def work():
        supervisor.beat("learning")
        time.sleep(seconds)
        done.set()

    supervisor.start("learner", work)
    return supervisor, done


def test_without_an_error_a_long_update_may_end(leaves, capfd):
    supervisor, done = working(0.4)
    supervisor.join(lambda names: None, hurry_s=0.05, patience_s=5.0)
    assert done.is_set()
    err = capfd.readouterr().err
    assert err == "stopping; waiting for learner (learning). Ctrl-C again leaves at once.\n"


@pytest.mark.parametrize(("fails", "patience_s"), [(True, 5.0), (False, 0.1)])
def test_what_does_not_end_in_time_is_left_behind(leaves, capfd, fails, patience_s):
    """After an error soon, else after the whole patience; the names of the threads reach the last words."""
    supervisor, done = working(1.0)
    if fails:
        supervisor.fail(ValueError("the first error"))
    words = []
    with pytest.raises(Left, match="70"):
        supervisor.join(words.extend, hurry_s=0.05, patience_s=patience_s)
    assert words == ["learner"] and not done.is_set()
    err = capfd.readouterr().err
    assert "threads learner do not end; leaving without them" in err
    assert ("podracer: ValueError: the first error" in err) == fails
    done.wait(5.0)


def test_after_an_error_there_is_time_for_what_has_taken_as_long_before(leaves):
    supervisor, done = Supervisor(), threading.Event()

    def work():
        for _ in range(2):
            supervisor.beat("learning")
            time.sleep(0.4)
        supervisor.beat("learning")
        supervisor.fail(ValueError("elsewhere"))
        time.sleep(0.4)
        done.set()

    supervisor.start("learner", work)
    supervisor.stopping.wait(5.0)
    supervisor.join(lambda names: None, hurry_s=0.05)
    assert done.is_set()


def test_one_of_several_hosts_leaves_soon_after_an_error(monkeypatch, leaves):
    """However long an update has taken before: the others wait for it in theirs."""
    monkeypatch.setattr(threads, "LEAVE_S", 0.05)
    monkeypatch.setattr(threads.hosts, "count", lambda: 2)
    monkeypatch.setattr(threads.hosts, "leave", lambda status, why: (_ for _ in ()).throw(Left(f"{status} {why}")))
    supervisor, done = working(1.0)
    supervisor.fail(ValueError("elsewhere"))
    with pytest.raises(Left, match="70 ValueError: elsewhere"):
        supervisor.join(lambda names: None, hurry_s=5.0)
    assert not done.is_set()
    done.wait(5.0)
