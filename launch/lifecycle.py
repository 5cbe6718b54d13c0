"""A run on a slice that may go away: all steps in a row, and again where starting again helps.

A run is started again where `exits.worth_restarting` says so, and with a new slice where this one was taken away, up to
`max_restarts` times in all; anything else ends the launch with that status. A slice that could not be asked is neither
replaced nor deleted (`patience.CutOff`): it may well train.
"""

from __future__ import annotations

from launch import patience, remote
from launch.following import TAKEN, Following
from launch.patience import CutOff
from launch.queued import LOST
from launch.tools import ToolFailed
from launch.words import say
from podracer import exits
from podracer.errors import UserError


class Launch(Following):
    """The steps, and `run`, which is all of them."""

    _begun = _there = False  # whether training was ever started, and whether that slice is still there

    def run(self) -> int:
        """All steps; the status of the training, which is that of the launch.

        Whatever happens, the run is fetched and the slice deleted at the end.

        Raises:
          CutOff: but not where nobody could say what has become of it.
        """
        self._clear()
        try:
            status = self._until_it_ends()
        except CutOff:
            raise
        except BaseException:
            self._end_early()
            raise
        self._end(status)
        return exits.PREEMPTED if status == TAKEN else status

    def left_alone(self, error: CutOff) -> None:
        """Say loudly that the slice is still there, and how to go on."""
        say(f"podracer: {self._name} IS LEFT AS IT IS, AND COSTS MONEY ({self._plan.price}): {error}")
        for step in ("logs", "delete"):
            say(f"  {self._command(step)}")

    def _until_it_ends(self) -> int:
        """Attempts, until there is a status that ends the launch, or TAKEN."""
        fresh, restarts = True, 0
        while True:
            if fresh:
                self._bring_up(again=restarts > 0)
            status = self._attempt(stop=not fresh)
            if status == TAKEN:
                self._there = False
            self.show_failures()
            if not (status == TAKEN or exits.worth_restarting(status)) or restarts == self._plan.max_restarts:
                return status
            restarts += 1
            fresh = status == TAKEN
            self._again(fresh, status, restarts)

    def _bring_up(self, again: bool) -> None:
        self._ask_for_it(again)
        self._await()
        self.copy()
        self.install()

    def _attempt(self, stop: bool) -> int:
        """Stop what still runs of the last one, start and follow; TAKEN also where the slice goes away meanwhile."""
        self._begun = self._there = True
        try:
            if stop:
                self._persist(lambda: self._slice.on_all(remote.stop(self._name)), patience.PATIENCE_S)
            self.start()
            return self.follow()
        except ToolFailed as error:
            if patience.ask(self._slice.state).kind in LOST:
                return TAKEN
            if error.final:  # a host said that it cannot be
                raise
            raise CutOff(f"it may still train, but its hosts do not answer: {error}") from error

    def _again(self, fresh: bool, status: int, restarts: int) -> None:
        """Make room for another attempt."""
        counted = f"{restarts} of {self._plan.max_restarts}"
        if fresh:
            say(f"the slice was taken away: making a new one ({counted})")
            self.delete()
            self._lines, self._found = 0, None
        else:
            say(f"status {status}: starting again ({counted})")

    def _end(self, status: int) -> None:
        """Fetch the run and delete the slice; a run that is nowhere else is not deleted with it.

        Raises:
          CutOff: such a run could not be fetched.
        """
        failure = None
        try:
            self.fetch(from_hosts=status != TAKEN)
        except Exception as error:
            if self._tools.dry_run:
                raise
            if status == TAKEN:
                say(f"nothing could be fetched: {error}")
            elif self._plan.bucket is None:
                raise CutOff(f"its run is only on its hosts, and could not be fetched: {error}") from error
            else:
                failure = error
        except KeyboardInterrupt:
            self._delete_at_the_end()
            raise
        self._delete_at_the_end()
        if failure is not None and status in (0, TAKEN):
            raise failure
        if failure is not None:  # of a run that failed, its own status says more
            say(f"podracer: not all of the run could be fetched: {failure}")

    def _end_early(self) -> None:
        """After an error or Ctrl-C: stop what runs, fetch what there is and delete the slice.

        Raises:
          CutOff: the run is nowhere else, and could not be fetched.
        """
        if self._tools.dry_run:  # whoever read the commands is gone
            return
        say("ending early: stopping the run, fetching what there is of it, then deleting the slice (--keep leaves it)")
        try:
            if self._begun:
                if self._there:
                    self._stop()
                self.fetch(from_hosts=self._there)
        except (ToolFailed, UserError) as error:
            if self._there and self._plan.bucket is None:
                raise CutOff(f"its run is only on its hosts, and could not be fetched: {error}") from error
            say(f"nothing could be fetched: {error}")
        except KeyboardInterrupt:  # a second one
            self._delete_at_the_end()
            raise
        self._delete_at_the_end()

    def _stop(self) -> None:
        """Have the training save and end; one that cannot be told is fetched as it is."""
        try:
            self._slice.on_all(remote.stop(self._name))
        except ToolFailed as error:
            say(f"the run could not be stopped: {error}")

    def _delete_at_the_end(self) -> None:
        leftover = f"{self._name} may still be there, and cost money: {self._command('delete')}"
        if self._plan.keep:
            say(leftover)
            return
        try:
            self.delete()
        except CutOff:  # says more
            raise
        except BaseException:
            say(leftover)
            raise
