"""Who writes to a run directory: one run at a time. A second one is refused, before it writes anything.

The file `lock` in the directory says who holds it: process, host, boot. The operating system lets go of it when the
process ends, however it ends, so that a killed run never stands in the way. Where the file system locks for one machine
only, the time of the file tells other machines whether its holder is alive: it is touched while the run goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import socket
import sys
import time
from typing import Any

from podracer.errors import UserError

NAME = "lock"
TOUCH_S = 30.0
STALE_S = 300.0  # without a touch, on another machine; a compilation may take minutes
POLL_S = 1.0


class Claim:
    """The right to write to a run directory, from now until `release` or the end of the process.

    Where a machine that may be gone has it, this waits until that one goes on, or its time is over.

    Raises:
      UserError: another run has it, or nothing can be written there.
    """

    def __init__(self, directory: pathlib.Path):
        self._path = directory / NAME
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UserError(
                f"run directory {directory} cannot be written: {error.strerror}. Change its permissions."
            ) from None
        holder = _parse(os.read(self._file, 4096))
        alone = _lock(self._file)
        held = not alone if alone is not None else _lives(holder)
        if held or _goes_on_elsewhere(holder, self._path):
            os.close(self._file)
            who = f"process {holder.get('pid', '?')} on {holder.get('host', 'a host')}"
            raise UserError(
                f"run directory {directory} is in use by {who} since {holder.get('since', 'a while')}. Stop that run "
                f"first, or train into another --run. (If it is gone: remove {self._path}.)"
            )
        self._touched = time.monotonic()
        self._write(json.dumps(_me()) + "\n")

    def touch(self) -> None:
        """Say that the run goes on; cheap enough for every update."""
        if time.monotonic() - self._touched > TOUCH_S:
            self._touched = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(self._file)

    def release(self) -> None:
        """Let others write. The empty file stays: removing it could remove the lock of whoever comes next."""
        self._write("")
        os.close(self._file)

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk: the lock itself holds without the text
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, text.encode(), 0)


def _lock(file: int) -> bool | None:
    """Whether the file is now locked by this process; None: this file system, or system, has no locks."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    return True


def _me() -> dict[str, Any]:
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"pid": os.getpid(), "host": socket.gethostname(), "boot": _boot(), "since": since}


def _boot() -> str | None:
    """Which start of this machine this is: process numbers begin anew with each."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _parse(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _here(holder: dict[str, Any]) -> bool:
    return holder.get("host") == socket.gethostname()


def _lives(holder: dict[str, Any]) -> bool:
    """Whether the holder is a process of this machine that is there, judged by its number."""
    if not _here(holder) or holder.get("boot") != _boot() or not isinstance(holder.get("pid"), int):
        return False
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return holder["pid"] != os.getpid()


def _goes_on_elsewhere(holder: dict[str, Any], path: pathlib.Path) -> bool:
    """Whether the holder is on another machine and says that it goes on; waits for that while it has done so lately.

    A run that was killed is often started again within a minute, and on another machine.
    """
    if not holder or _here(holder):
        return False
    first, said = path.stat().st_mtime, False
    while (left_s := STALE_S - (time.time() - first)) > 0:
        if not said:
            who = f"process {holder.get('pid', '?')} on {holder.get('host', 'a host')}"
            what = f"{path.parent} was in use by {who} a moment ago"
            print(f"podracer: {what}; waiting for {left_s:.0f} s to see whether that one is gone", file=sys.stderr)
            said = True
        time.sleep(min(POLL_S, left_s))
        if path.stat().st_mtime != first:
            return True
    return False
