"""What the hosts of a slice say: the first one's output as it comes, all statuses, the logs of those that failed."""

from __future__ import annotations

import time

from launch import patience, remote
from launch.fetching import Fetching
from launch.queued import GONE, LOST, READY
from launch.tools import ToolFailed
from launch.verdicts import failed, verdict
from launch.words import say
from podracer import exits
from podracer.errors import UserError

GRACE_S = 120.0  # for the other hosts, once one has ended
ASK_S = 5.0  # between questions to hosts of which some have ended
TAKEN = -1  # instead of a status: the slice is gone
LINES, HOSTS = 40, 8  # of the logs of hosts that failed: how much is shown


class Following(Fetching):
    """The steps, and following what they started."""

    _lines = 0  # of the log, shown so far
    _found: dict[str, str] | None = None  # the statuses of the hosts, as last read

    def logs(self) -> int:
        """As `follow`, for a slice that may not be there; the exit status."""
        if not self._tools.dry_run:
            state = self._slice.state()
            if state.kind == GONE:
                return self._say_taken(state.text)
            if state.kind != READY:
                raise UserError(
                    f"{self._name} is not there ({state.text}); expected a slice that is ready. "
                    f"Check --name, --zone, --project and --api, or ask again: {self._command('status')}"
                )
            found = self.statuses()
            if found is None:
                return self._say_taken(patience.ask(self._slice.state).text)
            if set(found.values()) == {"none"}:
                raise UserError(f"{self._name} has nothing installed; expected a run to follow. First: copy and start.")
        status = self.follow()
        if status == TAKEN:
            return self._say_taken(patience.ask(self._slice.state).text)
        self.show_failures()
        return status

    def follow(self) -> int:
        """Show what the first host says until all have ended; the status of the run, or TAKEN."""
        self._tell("follow the first host, until it ends")
        ended_at, last = None, False
        while True:
            whole = self._stream()
            if self._tools.dry_run:
                self._tell("ask every host for its status")
                self._slice.on_all(remote.status(self._name))
                return 0
            found = self._found = self.statuses()
            if found is None:
                return TAKEN
            running = [host for host, status in found.items() if status == "running"]
            if len(running) < len(found):
                ended_at = ended_at or time.monotonic()
            # The others need a while to notice, and to save.
            ended = not running or (ended_at is not None and time.monotonic() - ended_at > GRACE_S)
            if ended and (whole or last):
                return verdict(found)
            last = ended  # once more, for what it said since the connection broke
            time.sleep(ASK_S)

    def _stream(self) -> bool:
        """Show what the first host says until it ends or the connection breaks; whether it was the former."""
        try:
            self._slice.on_first(remote.follow(self._name, self._lines + 1), self._show)
            return True
        except ToolFailed as error:
            say(f"the first host's output broke off: {error}")
            return False

    def statuses(self) -> dict[str, str] | None:
        """By host what has become of its process, or None where the cloud says that the slice is gone.

        Raises:
          CutOff: the hosts said nothing for long, nor did the cloud say that they are gone.
        """

        def question() -> dict[str, str] | None:
            try:
                return self.ask_hosts()
            except ToolFailed:
                if self._slice.state().kind in LOST:
                    return None
                raise

        return patience.ask(question)

    def ask_hosts(self) -> dict[str, str]:
        """By host what has become of its process; asked once.

        Raises:
          ToolFailed: no answer.
        """
        answers = self._slice.on_all(remote.status(self._name))
        words = [line.split() for answer in answers for line in answer.splitlines()]
        found = {each[1]: each[2] for each in words if len(each) == 3 and each[0] == remote.STATUS}
        if not found:
            raise ToolFailed(["ssh"], 0, "the hosts do not say what has become of their processes")
        return found

    def show_state(self) -> None:
        """The slice, and the processes on its hosts."""
        if self._tools.dry_run:
            self._tell("ask what has become of the slice, and every host for its status")
            self._tools.show([*self._slice.question(), "--format=json"])
            self._slice.on_all(remote.status(self._name))
            return
        state = self._slice.state()
        print(f"{self._name}: {state.text}")
        for host, status in sorted(self.ask_hosts().items()) if state.kind == READY else ():
            print(f"host {host}: {status}")

    def show_failures(self) -> None:
        """The end of the log of each host that failed; the one that may have made the others fail comes last."""
        hosts = failed(self._found or {})
        if hosts in ([], ["0"]) or self._tools.dry_run:  # the first one's has been shown
            return
        if len(hosts) > HOSTS:
            say(f"{len(hosts)} hosts failed; the logs of {HOSTS} of them:")
        for host in hosts[-HOSTS:]:
            try:
                names = self._slice.hosts()
                name = names[int(host) if host.isdigit() and int(host) < len(names) else 0]
                text = self._slice.on_host(name, remote.end_of_log(self._name, LINES))
            except ToolFailed as error:
                text = f"its log cannot be read: {error}"
            for line in text.splitlines():
                say(f"host {host}: {line}")

    def _show(self, line: str) -> None:
        self._lines += 1
        print(line, flush=True)

    def _say_taken(self, text: str) -> int:
        say(f"podracer: {self._name} was taken away ({text}); a new launch goes on from the checkpoint in --bucket.")
        return exits.PREEMPTED
