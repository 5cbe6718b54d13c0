"""The steps of a launch on a slice, each on its own: create, copy, install, start, delete."""

from __future__ import annotations

import pathlib
import shlex
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from launch import patience, project, remote
from launch.queued import FAILED, FOREIGN, GONE, LOST, MISSING, READY, State
from launch.tools import ToolFailed, Tools
from launch.words import say
from podracer.errors import UserError

POLL_S = 20.0  # between questions to the cloud
HOSTS_S = 600.0  # how long a host on which nothing trains, or a bucket, is tried: a new host answers late


class Slice(Protocol):
    """What `queued.QueuedResource` and `compute.InstanceGroup` have in common."""

    name: str

    def delete_commands(self) -> list[list[str]]: ...
    def question(self) -> list[str]: ...
    def state(self) -> State: ...
    def hosts(self) -> list[str]: ...
    def on_all(self, script: str) -> list[str]: ...
    def on_first(self, script: str, each_line: Any) -> None: ...
    def on_host(self, host: str, script: str) -> str: ...
    def upload(self, path: pathlib.Path) -> None: ...
    def download(self, host: str, remote: str, path: pathlib.Path) -> list[str]: ...


class Plan(NamedTuple):
    """Everything that a launch needs to know beside the slice."""

    create: list[list[str]]  # commands
    source: pathlib.Path
    requirement: str  # what pip installs on the hosts
    command: list[str]  # podracer train ...
    bucket: str | None
    out: pathlib.Path  # where the run comes back to
    max_restarts: int
    wait_s: float  # for the slice
    keep: bool  # do not delete it at the end
    flags: list[str]  # that find this slice again
    price: str  # in words


class Steps:
    """What can be done with one slice."""

    def __init__(self, tools: Tools, where: Slice, plan: Plan):
        self._tools, self._slice, self._plan = tools, where, plan
        self._name = where.name

    def create(self) -> None:
        """Ask for the slice, after removing one of ours that failed; wait for it.

        Raises:
          ToolFailed: it failed, or did not come in time.
          UserError: there is one of that name already.
        """
        self._clear()
        self._ask_for_it()
        self._await()

    def copy(self) -> None:
        """Copy the project to all hosts."""
        chosen = project.files(self._plan.source)
        self._tell("copy the project to every host" + ("" if self._tools.dry_run else f": {len(chosen)} files"))
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / remote.archive(self._name)
            if self._tools.dry_run:
                print(project.packing(self._plan.source, path.name))
                self._slice.upload(pathlib.Path(path.name))
                return
            project.pack(self._plan.source, chosen, path)
            self._persist(lambda: self._slice.upload(path), HOSTS_S)

    def install(self) -> None:
        """Install it on all hosts."""
        self._tell("install on every host")
        pins = f"constraints/python{remote.PYTHON}.txt"
        constraints = pins if (self._plan.source / pins).is_file() else None
        script = remote.install(self._name, self._plan.requirement, constraints, self._plan.bucket)
        self._persist(lambda: self._slice.on_all(script), HOSTS_S)

    def start(self) -> None:
        """Start one process on every host."""
        self._tell("start one process on every host")
        # A try that was cut off may have started it on some hosts, or on all: the mark tells.
        mark = "1" if self._tools.dry_run else str(time.time_ns())
        script = remote.start(self._name, self._plan.command, self._plan.bucket, mark)
        self._persist(lambda: self._slice.on_all(script), patience.PATIENCE_S)

    def delete(self) -> None:
        """Delete what carries our label, and nothing else.

        Raises:
          UserError: what has this name was not made by a launch.
          CutOff: nobody could say what it is.
        """
        self._tell("delete the slice")
        if not self._tools.dry_run:
            state = patience.ask(self._slice.state)
            if state.kind == FOREIGN:
                raise UserError(f"{self._name} was not made by podracer launch ({state.text}); it stays as it is.")
            say(f"{self._name}: {state.text}")
        missing = lambda error: error.says_not_found
        for words in patience.ask(self._slice.delete_commands):
            try:
                patience.keep_trying(lambda words=words: self._tools.run(words), HOSTS_S, final=missing)
            except ToolFailed as error:
                if not error.says_not_found:
                    raise

    def _clear(self) -> None:
        """Remove what an earlier launch of this name left; refuse what is not ours or in use."""
        self._tell("create the slice")
        if self._tools.dry_run:
            return
        state = self._slice.state()  # asked once: nothing costs money yet
        if state.kind == FOREIGN:
            raise UserError(f"{self._name} exists, {state.text}; expected a new name. Choose another --name.")
        if state.kind in (FAILED, GONE):
            say(f"{self._name} is left from before ({state.text}): deleting it first")
            self.delete()
        elif state.kind != MISSING:
            raise UserError(
                f"{self._name} exists ({state.text}); expected a new name. Choose another --name, or delete it: "
                f"{self._command('delete')}"
            )

    def _ask_for_it(self, again: bool = False) -> None:
        """Create it; once more than at first, also where the cloud does not answer."""

        def once(words: list[str]) -> None:
            try:
                self._tools.run(words)
            except ToolFailed as error:
                if not (again and error.says_exists):  # a try before, whose answer was lost
                    raise

        for words in self._plan.create:
            if again:
                patience.keep_trying(lambda words=words: once(words), HOSTS_S, final=lambda error: False)
            else:
                once(words)

    def _await(self) -> None:
        """Wait until the slice is ready."""
        self._tell("wait until it is ready")
        words = [*self._slice.question(), "--format=json"]
        if self._tools.dry_run:
            self._tools.show(words)
            return
        until, before = time.monotonic() + self._plan.wait_s, ""
        while time.monotonic() < until:
            state = patience.ask(self._slice.state)
            if state.text != before:
                say(f"{self._name}: {state.text}")
            before = state.text
            if state.kind == READY:
                return
            if state.kind in (FAILED, FOREIGN):
                raise ToolFailed(words, 0, f"ERROR: the slice cannot be had: {state.text}")
            if state.kind == GONE:  # taken away before it was used: ask again
                self.delete()
                self._ask_for_it(again=True)
            time.sleep(POLL_S)
        raise ToolFailed(words, 0, f"ERROR: no slice after {self._plan.wait_s / 3600:g} hours: {before}")

    def _persist(self, action: Callable[[], Any], for_s: float) -> None:
        """Something on the hosts, tried again while they do not answer and the slice is not known to be gone."""

        def once():
            try:
                action()
            except ToolFailed as error:
                error.final = error.final or self._slice.state().kind in LOST
                raise

        patience.keep_trying(once, for_s)

    def _command(self, step: str) -> str:
        """What one types for a step with this slice."""
        return shlex.join(["podracer", "launch", "tpu-vm", step, *self._plan.flags])

    def _tell(self, text: str) -> None:
        print(f"# {text}", flush=True) if self._tools.dry_run else say(text)
