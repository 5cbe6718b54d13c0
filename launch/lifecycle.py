"""A run on a slice that may go away: all steps in a row, and again where starting again helps.

A run is started again where `exits.worth_restarting` says so, and with a new slice where this one was taken away, up to
`max_restarts` times in all; anything else ends the launch with that status.
"""

from __future__ import annotations

import contextlib
import time

from launch import remote, steps
from launch.queued import GONE, MISSING, READY
from launch.steps import Steps
from launch.tools import ToolFailed
from launch.words import say
from podracer import exits
from podracer.errors import UserError

GRACE_S = 120.0  # for the other hosts, once one has ended
ASK_S = 5.0  # between questions to hosts of which some have ended
TAKEN = -1  # instead of a status: the slice is gone


class Launch(Steps):
    """The steps, and `run`, which is all of them."""

    _lines = 0  # of the log, shown so far

    def run(self) -> int:
        """All steps; the status of the training, which is that of the launch.

        Whatever happens, the run is fetched and the slice deleted at the end.
        """
        self._clear()
        fresh, started, finished, restarts = True, False, False, 0
        try:
            while True:
                if fresh:
                    self._bring_up()
                started = True
                status = self._attempt()
                if not (status == TAKEN or exits.worth_restarting(status)) or restarts == self._plan.max_restarts:
                    break
                restarts += 1
                fresh = status == TAKEN
                self._again(fresh, status, restarts)
            finished = status != TAKEN  # of a slice that is gone nothing can be fetched, but from a bucket
            return exits.PREEMPTED if status == TAKEN else status
        finally:
            self._end(started, finished)

    def follow(self) -> int:
        """Show what the first host says until all have ended; the status of the run, or TAKEN."""
        self._tell("follow the first host, until it ends")
        ended_at = None
        while True:
            self._slice.on_first(remote.follow(self._name, self._lines + 1), self._show)
            if self._tools.dry_run:
                self._tell("ask every host for its status")
                self._slice.on_all(remote.status(self._name))
                return 0
            found = self.statuses()
            if found is None:
                return TAKEN
            running = [host for host, status in found.items() if status == "running"]
            if len(running) < len(found):
                ended_at = ended_at or time.monotonic()
            # The others need a while to notice, and to save.
            if not running or (ended_at is not None and time.monotonic() - ended_at > GRACE_S):
                return verdict(found)
            time.sleep(ASK_S)

    def statuses(self) -> dict[str, str] | None:
        """By host what has become of its process, or None where the slice is gone."""
        for _ in range(steps.TRIES):
            with contextlib.suppress(ToolFailed):
                answers = self._slice.on_all(remote.status(self._name))
                words = [line.split() for answer in answers for line in answer.splitlines()]
                found = {each[1]: each[2] for each in words if len(each) == 3 and each[0] == remote.STATUS}
                if found:
                    return found
            if self._slice.state().kind != READY:
                return None
            time.sleep(steps.POLL_S)
        return None

    def show_questions(self) -> None:
        """What `status` asks, for a dry run."""
        self._tell("ask what has become of the slice, and every host for its status")
        self._tools.show([*self._slice.question(), "--format=json"])
        self._slice.on_all(remote.status(self._name))

    def _bring_up(self) -> None:
        self._ask_for_it()
        self._await()
        self.copy()
        self.install()

    def _attempt(self) -> int:
        """Start and follow; TAKEN also where the slice goes away in the middle of a command."""
        try:
            self.start()
            return self.follow()
        except ToolFailed:
            if self._slice.state().kind in (GONE, MISSING):
                return TAKEN
            raise

    def _again(self, fresh: bool, status: int, restarts: int) -> None:
        """Make room for another attempt."""
        counted = f"{restarts} of {self._plan.max_restarts}"
        if fresh:
            say(f"the slice was taken away: making a new one ({counted})")
            self.delete()
            self._lines = 0
        else:
            say(f"status {status}: starting again ({counted})")
            self._slice.on_all(remote.stop(self._name))

    def _end(self, started: bool, finished: bool) -> None:
        """Fetch what there is and delete the slice, also after an error or Ctrl-C."""
        if self._tools.dry_run and not finished:  # whoever read the commands is gone
            return
        if not finished:
            say("ending early: fetching what there is of the run, then deleting the slice (--keep would leave it)")
        try:
            if started:
                self._fetch_what_there_is(finished)
        finally:
            leftover = f"{self._name} may still be there, and cost money: podracer launch tpu-vm delete --name ..."
            if self._plan.keep:
                say(leftover)
            else:
                try:
                    self.delete()
                except BaseException:
                    say(leftover)
                    raise

    def _fetch_what_there_is(self, finished: bool) -> None:
        try:
            self.fetch()
        except (ToolFailed, UserError) as error:
            if finished:
                raise
            say(f"nothing could be fetched: {error}")

    def _show(self, line: str) -> None:
        self._lines += 1
        print(line, flush=True)


def verdict(found: dict[str, str]) -> int:
    """One status for the run: what cannot be mended by starting again comes first, success only where all had it.

    That another host is gone only counts where no host says more; nor does the abort that JAX makes of it.
    """
    numbers = [int(status) if status.isdigit() else exits.PEER_LOST for status in found.values()]
    reasons = (exits.BAD_INPUT, exits.NOT_FINITE, exits.STALLED, exits.INTERNAL, exits.PREEMPTED, exits.PEER_LOST)
    for status in reasons:
        if status in numbers:
            return status
    return max(numbers)
