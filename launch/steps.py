"""The steps of a launch on a slice, each on its own: create, copy, install, start, fetch, delete."""

from __future__ import annotations

import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from launch import project, remote
from launch.queued import FAILED, FOREIGN, GONE, MISSING, READY, State
from launch.tools import ToolFailed, Tools
from launch.words import say
from podracer.errors import UserError

POLL_S = 20.0  # between questions to the cloud
TRIES = 10  # of a connection: a new host answers late


class Slice(Protocol):
    """What `queued.QueuedResource` and `compute.InstanceGroup` have in common."""

    name: str

    def delete_commands(self) -> list[list[str]]: ...
    def question(self) -> list[str]: ...
    def state(self) -> State: ...
    def hosts(self) -> list[str]: ...
    def on_all(self, script: str) -> list[str]: ...
    def on_first(self, script: str, each_line: Any) -> None: ...
    def upload(self, path: pathlib.Path) -> None: ...
    def download(self, host: str, remote: str, path: pathlib.Path) -> None: ...


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
                self._slice.upload(pathlib.Path(path.name))
                return
            project.pack(self._plan.source, chosen, path)
            self._persist(lambda: self._slice.upload(path))

    def install(self) -> None:
        """Install it on all hosts."""
        self._tell("install on every host")
        pins = f"constraints/python{remote.PYTHON}.txt"
        constraints = pins if (self._plan.source / pins).is_file() else None
        self._slice.on_all(remote.install(self._name, self._plan.requirement, constraints, self._plan.bucket))

    def start(self) -> None:
        """Start one process on every host."""
        self._tell("start one process on every host")
        self._slice.on_all(remote.start(self._name, self._plan.command, self._plan.bucket))

    def fetch(self) -> None:
        """Bring the run directory here: from the bucket, or from all hosts, the first one's files last."""
        self._tell("fetch the run")
        out, dry = self._plan.out, self._tools.dry_run
        if self._plan.bucket:
            if not dry:
                out.mkdir(parents=True, exist_ok=True)
            source = f"gs://{self._plan.bucket}/{self._name}"
            self._tools.run(["gcloud", "storage", "rsync", "--recursive", source, str(out)])
        else:
            self._slice.on_all(remote.pack(self._name))
            with tempfile.TemporaryDirectory() as folder:
                for host in reversed(self._slice.hosts()):
                    path = pathlib.Path("run.tar.gz" if dry else f"{folder}/run.tar.gz")
                    self._slice.download(host, f"{remote.folder(self._name)}/run.tar.gz", path)
                    if not dry:
                        project.unpack(path, out)
        if not dry:
            say(f"the run is in {out}")

    def delete(self) -> None:
        """Delete what carries our label, and nothing else.

        Raises:
          UserError: what has this name was not made by a launch.
        """
        self._tell("delete the slice")
        if not self._tools.dry_run:
            state = self._slice.state()
            if state.kind == FOREIGN:
                raise UserError(f"{self._name} was not made by podracer launch ({state.text}); it stays as it is.")
            say(f"{self._name}: {state.text}")
        for words in self._slice.delete_commands():
            try:
                self._tools.run(words)
            except ToolFailed as error:
                if not error.says_not_found:
                    raise

    def _clear(self) -> None:
        """Remove what an earlier launch of this name left; refuse what is not ours or in use."""
        self._tell("create the slice")
        if self._tools.dry_run:
            return
        state = self._slice.state()
        if state.kind == FOREIGN:
            raise UserError(f"{self._name} exists, {state.text}; expected a new name. Choose another --name.")
        if state.kind in (FAILED, GONE):
            say(f"{self._name} is left from before ({state.text}): deleting it first")
            self.delete()
        elif state.kind != MISSING:
            raise UserError(
                f"{self._name} exists ({state.text}); expected a new name. Choose another --name, or delete it: "
                f"podracer launch tpu-vm delete --name {self._name} ..."
            )

    def _ask_for_it(self) -> None:
        for words in self._plan.create:
            self._tools.run(words)

    def _await(self) -> None:
        """Wait until the slice is ready."""
        self._tell("wait until it is ready")
        words = [*self._slice.question(), "--format=json"]
        if self._tools.dry_run:
            self._tools.show(words)
            return
        until, before = time.monotonic() + self._plan.wait_s, ""
        while time.monotonic() < until:
            state = self._slice.state()
            if state.text != before:
                say(f"{self._name}: {state.text}")
            before = state.text
            if state.kind == READY:
                return
            if state.kind in (FAILED, FOREIGN):
                raise ToolFailed(words, 0, f"ERROR: the slice cannot be had: {state.text}")
            if state.kind == GONE:  # taken away before it was used: ask again
                self.delete()
                self._ask_for_it()
            time.sleep(POLL_S)
        raise ToolFailed(words, 0, f"ERROR: no slice after {self._plan.wait_s / 3600:g} hours: {before}")

    def _persist(self, action: Callable[[], None]) -> None:
        """A first connection to new hosts, tried again where it fails."""
        for left in reversed(range(TRIES)):
            try:
                return action()
            except ToolFailed as error:
                if not left:
                    raise
                say(f"not yet: {error}")
                time.sleep(POLL_S)

    def _tell(self, text: str) -> None:
        print(f"# {text}", flush=True) if self._tools.dry_run else say(text)
