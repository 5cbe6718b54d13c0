"""The folder that holds a run's checkpoints: which are there, which of them are whole, which may go."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import sys
from typing import Any

from podracer import manifest
from podracer.errors import UserError

FORMAT = 2
TEMPORARY = ".orbax-checkpoint-tmp"
SPARE_BYTES = 2**20  # beside the arrays: directories, manifest

_NAME = re.compile(r"(\d+)(?:-(\d+))?")


class Foreign(manifest.Damaged):
    """A checkpoint of another run."""


class Shelf:
    """The checkpoints in one folder, by name: `STEPS`, or `STEPS-N` where one was written again.

    Args:
      directory: an `epath.Path`.
      keep: how many of the newest stay.
      run: identifies the run, so that another one's checkpoints are not taken for its own; None: any.
    """

    def __init__(self, directory: Any, keep: int, run: str | None):
        self.directory, self.keep, self.run = directory, keep, run
        self._used: set[str] = set()  # names that were given out, also those that nothing came of
        self._verified: dict[str, dict[str, Any] | Exception] = {}

    def names(self) -> list[str]:
        """The names of checkpoints, whole or not, oldest first."""
        found = [path.name for path in self.directory.iterdir()] if self.directory.exists() else []
        return sorted((name for name in found if _NAME.fullmatch(name)), key=parse)

    def complete(self) -> list[str]:
        """Those of them that were written to their end, whatever has become of them since."""
        return [name for name in self.names() if manifest.exists(self.directory / name)]

    def verify(self, name: str) -> dict[str, Any] | Exception:
        """The manifest of a checkpoint whose files are all as it says, or what is wrong. Each is read once."""
        if name not in self._verified:
            folder = self.directory / name
            try:
                content = (None if manifest.exists(folder) else _of_format_1(folder)) or manifest.read(folder)
                self._check_ours(name, content)
                manifest.check(folder, content)
                self._verified[name] = content
            except Exception as error:
                self._verified[name] = error
        return self._verified[name]

    def _check_ours(self, name: str, content: dict[str, Any]) -> None:
        if content["format"] not in (1, FORMAT):
            raise manifest.Damaged(f"it has format {content['format']}, this version reads {FORMAT}")
        if content["steps"] != parse(name)[0]:
            raise manifest.Damaged(f"its manifest says that it is of {content['steps']} steps")
        if content["run"] and self.run and content["run"] != self.run:
            raise Foreign("it belongs to another run")

    def check_free(self) -> None:
        """Refuse a folder where another run keeps its checkpoints, or that cannot be reached.

        Raises:
          UserError: it is so.
        """
        try:
            foreign = [name for name in self.names() if isinstance(self.verify(name), Foreign)]
        except Exception as error:  # whatever a bucket's library says
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise UserError(
                f"checkpoint_dir {self.directory} cannot be reached: {reason.rstrip('.')}. Check its name and your "
                "rights, and that the library for such paths is installed."
            ) from error
        if foreign:
            raise UserError(
                f"{self.directory} holds checkpoints of another run ({', '.join(foreign[:3])}). "
                "Give each run a --checkpoint-dir of its own."
            )

    def newest_whole(self, passed_over: list[tuple[str, Exception]]) -> str:
        """The newest that is whole and not among those passed over; adds to them what is wrong with newer ones.

        Raises:
          UserError: there is none.
        """
        before = {name for name, _ in passed_over}
        for name in reversed(self.names()):
            if name in before:
                continue
            found = self.verify(name)
            if not isinstance(found, Exception):
                return name
            passed_over.append((name, found))
        if not passed_over:
            raise UserError(
                f"no complete checkpoint in {self.directory}: the run was stopped before its first. Train anew."
            )
        name, error = passed_over[0]
        others = len(passed_over) - 1
        raise self.unreadable(name, error, f" Nor can the {others} before it." if others else "")

    def cannot(self, name: str, error: Exception) -> str:
        """That a checkpoint cannot be read, and why."""
        reason = (" ".join(str(error).split())[:200] or type(error).__name__).rstrip(".")
        return f"checkpoint {self.directory / name} cannot be read: {reason}"

    def unreadable(self, name: str, error: Exception, also: str = "") -> UserError:
        """The same, for a user who can go on with no other."""
        if isinstance(error, manifest.Damaged):
            what = "It is damaged or not this run's; restore it from a copy, or train anew."
        else:
            what = "Was it made by this agent, network and environment?"
        return UserError(f"{self.cannot(name, error)}.{also} {what}")

    def new_name(self, steps: int, num_bytes: int) -> str:
        """Make room for a checkpoint, and a name; what a killed run left half written is removed.

        Raises:
          OSError: it cannot be written there.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        self.clean()
        _check_space(self.directory, num_bytes)
        again = [number for at, number in map(parse, {*self.names(), *self._used}) if at == steps]
        return format_name(steps, max(again) + 1 if again else 0)

    def take(self, name: str) -> None:
        """A checkpoint of this name is being written."""
        self._used.add(name)
        self._verified.pop(name, None)

    def under_way(self, name: str) -> Any:
        """The folder in which a checkpoint is being written: a bucket has no temporary name."""
        found = [path for path in self.directory.iterdir() if path.name.startswith(name + TEMPORARY)]
        return found[0] if found else self.directory / name

    def clean(self) -> None:
        """Remove what is half written; nothing may be under way."""
        with contextlib.suppress(OSError):
            for path in list(self.directory.iterdir()) if self.directory.exists() else []:
                if TEMPORARY in path.name or (_NAME.fullmatch(path.name) and not _is_complete(path)):
                    path.rmtree()

    def finish(self, name: str, content: dict[str, Any]) -> None:
        """A checkpoint is complete: delete all but the newest.

        Damaged ones do not count, or they would push out the good ones. What claims to be newer is of a time before the
        run went back to an earlier checkpoint, and goes, too. Another run's are not ours to delete.
        """
        self._verified[name] = content
        names = self.names()
        good = [each for each in names if parse(each) <= parse(name) and not isinstance(self.verify(each), Exception)]
        newest = {parse(each)[0]: each for each in good}  # the last written, where there are several of the same steps
        stay = {newest[steps] for steps in sorted(newest)[-self.keep :]}
        for each in names:
            if each not in stay and not isinstance(self.verify(each), Foreign):
                manifest.remove(self.directory / each)


def parse(name: str) -> tuple[int, int]:
    """`(steps, how often written before)` of a name; they sort by age."""
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return int(match[1]), int(match[2] or 0)


def format_name(steps: int, again: int) -> str:
    """The name that `parse` takes apart."""
    return f"{steps}-{again}" if again else str(steps)


def warn(text: str) -> None:
    """A line that is not to be overlooked."""
    print(f"podracer: warning: {text}", file=sys.stderr, flush=True)


def _is_complete(folder: Any) -> bool:
    return manifest.exists(folder) or _of_format_1(folder) is not None


def _of_format_1(folder: Any) -> dict[str, Any] | None:
    """What a manifest would say of a checkpoint from before there were any; None: it is none, or torn."""
    try:
        if not (folder / "_CHECKPOINT_METADATA").exists() or not (folder / "params").is_dir():
            return None
        meta = json.loads((folder / "meta" / "metadata").read_text())
        return {"format": meta["format"], "run": None, "steps": meta["steps"], "meta": meta, "files": {}}
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _check_space(directory: Any, num_bytes: int) -> None:
    """Refuse to begin what cannot end well: a disk that is filled to the brim hurts more than this run.

    Raises:
      OSError: too little is free.
    """
    if manifest.is_local(directory):
        free = shutil.disk_usage(directory).free
        if free < num_bytes + SPARE_BYTES:
            text = (
                f"{os.strerror(errno.ENOSPC)}: a checkpoint needs {num_bytes + SPARE_BYTES:,} bytes, {free:,} are free"
            )
            raise OSError(errno.ENOSPC, text, str(directory))
