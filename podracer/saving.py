"""The checkpoints of a run in progress: when one is due, and what happens where they cannot be written."""

from __future__ import annotations

import contextlib
import math
import pathlib
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from podracer import config, echoes, hosts
from podracer.checkpoint import Checkpoints, OneHostFailed
from podracer.claim import Claim
from podracer.errors import NotSaved, UserError
from podracer.shelf import warn

if TYPE_CHECKING:
    from podracer.scoring import ScoredRun

RETRY_S = 60.0  # after a failure, where no checkpoint is due sooner
CHECKS = 4  # per interval: how often the hosts ask the first one's clock

# What file systems and Orbax say, in all the words around it.
REASONS = re.compile(
    "No space left on device|Disk quota exceeded|File too large|Read-only file system|Permission denied"
    "|Input/output error|Too many open files|Stale file handle|No such file or directory"
)


def open_checkpoints(
    directory: pathlib.Path, kind: str = "checkpoints", keep: int = 2, place: str | None = None, alone: bool = False
) -> Checkpoints:
    """Checkpoints of the run in `directory`; another run's that were put there are refused.

    Args:
      directory: the run directory.
      kind: `checkpoints` or `best`.
      keep: how many of the newest stay.
      place: where they are, if not where the settings of the run say.
      alone: see `Checkpoints`.
    """
    content: dict[str, Any]
    try:
        content = config.read(directory)
    except UserError:  # on a host that does not see the run directory
        content = {"settings": {}}
    place = place or content["settings"].get("checkpoint_dir")
    return Checkpoints(f"{place or directory}/{kind}", keep, content.get("id"), alone)


def open_best(run: ScoredRun) -> Checkpoints:
    """The best params of a run so far: the same on all hosts, so that each reads them and the first writes them."""
    assert run.directory is not None
    return open_checkpoints(run.directory, "best", 1, run.settings.checkpoint_dir, alone=True)


def save_best(run: ScoredRun, steps: int, params: Any, meta: dict[str, Any]) -> None:
    """Write the best params; a failure is a warning: they are still in memory, and the training goes on."""
    if run.directory is None or not hosts.is_first():
        return
    best = open_best(run)
    try:
        best.save(steps, params, (), meta)
        best.close()
    except Exception as error:
        warn(f"the best params of {run.directory}, at {steps:,} steps, could not be written: {describe(error)}")


class Saver:
    """The checkpoints of one run, from its first update to its last, on all hosts.

    A context: no other run may write to the directory inside it, and when it is left, the last checkpoint is complete.
    Without a run directory, it does nothing.

    Args:
      run: which run.
      now: a clock, in seconds.

    Raises:
      UserError: another run writes to that directory.
      NotSaved: from `due`, when nothing could be written for too long; at the end, where the last one was not.
    """

    def __init__(self, run: ScoredRun, now: Callable[[], float] = time.monotonic):
        settings, self._run, self._now = run.settings, run, now
        self._every_s, self._limit_s = settings.checkpoint_every_s, settings.checkpoint_max_age_s
        self._checkpoints: Checkpoints | None = None
        self._claim: Claim | None = None
        self._quiet = contextlib.ExitStack()
        self._began = self._since = now()
        self._good: tuple[int | None, float] = (run.steps or None, now())  # the last good one: steps, when
        self._pending: tuple[int, float] | None = None  # the one that is being written
        self._failure: str | None = None  # of the last one
        self._counts: dict[str, int] = {}
        self._number = self._at = self._next = -1  # calls or updates: the last asked about, last saved, next question

    def __enter__(self) -> Saver:
        run = self._run
        if run.directory is not None:
            checkpoints = open_checkpoints(run.directory, keep=run.settings.keep, place=run.settings.checkpoint_dir)
            self._take_claim(run.directory, checkpoints)
            self._checkpoints = checkpoints
            self._quiet.enter_context(echoes.left_out())
        return self

    def __exit__(self, kind, *_) -> None:
        try:
            # One of several hosts that has failed leaves at once: the others may not come to complete the write.
            if self._checkpoints is not None and (kind is None or hosts.count() == 1):
                self._settle(self._checkpoints.close)
                if kind is None and self._failure is not None:
                    raise NotSaved(
                        f"the last checkpoint of {self._run.directory}, at {self._run.steps:,} steps, could not be "
                        f"written: {self._failure}. {self._describe_good()}"
                    )
        finally:
            self._quiet.close()
            if self._claim is not None:
                self._claim.release()

    def due(self, number: int) -> bool:
        """Whether to save now, after call or update `number`, by the clock: the same on all hosts.

        Call it once for each number, on all hosts.

        Raises:
          NotSaved: there has been no good checkpoint for too long.
        """
        if self._checkpoints is None:
            return False
        self._poll()
        if self._next < 0:
            self._at, self._next = number - 1, number
        self._number = number
        if number < self._next:
            return False
        due, ahead, over = hosts.from_first("checkpoint is due", [*self._plan(number), self._is_over()])
        self._next = number + int(ahead)
        if over:
            raise NotSaved(
                f"training stopped: no checkpoint could be written for {self._limit_s:,.0f} s "
                f"({self._failure or 'see the first host'}). {self._describe_good()}"
            )
        return bool(due)

    def save(self, steps: int, params: Any, state: Any, meta: dict[str, Any]) -> None:
        """Begin to write a checkpoint; see `Checkpoints.save`. A failure is a warning, and the training goes on."""
        if self._checkpoints is None:
            return
        self._since, self._at = self._now(), self._number
        self._settle(self._checkpoints.wait)  # what went wrong with the one before, on this host
        try:
            self._checkpoints.save(steps, params, state, meta)
            self._pending = steps, self._now()
        except OneHostFailed:
            raise  # and so the others end, and all start again from the last checkpoint
        except Exception as error:
            self._failed(error)

    def finish(self) -> None:
        """Wait until what is being written is complete; a failure is a warning."""
        if self._checkpoints is not None:
            self._settle(self._checkpoints.wait)

    def _take_claim(self, directory: pathlib.Path, checkpoints: Checkpoints) -> None:
        """Claim the run directory, for all hosts; a new run finds no other one's checkpoints in its place."""

        def take() -> None:
            self._claim = Claim(directory)
            if not self._run.steps:
                try:
                    checkpoints.check_free()
                except UserError:
                    self._claim.release()
                    raise

        hosts.on_first(take)

    def _plan(self, number: int) -> tuple[bool, int]:
        """Whether a checkpoint is due, and after how many calls to ask again."""
        every_s = min(self._every_s or math.inf, RETRY_S if self._failure else math.inf)
        done, passed_s = max(number - self._at, 1), self._now() - self._since
        left_s = every_s - passed_s
        each_s = max(passed_s / done, 1e-9)
        usual = max(1, int(min(every_s, RETRY_S) / each_s / CHECKS))
        if left_s < each_s / 2:
            return True, usual
        # At first little is known about the speed: as many calls ahead as there were, at most.
        return False, max(1, min(done, usual, int(min(left_s / each_s, 1e9))))

    def _is_over(self) -> bool:
        return self._failure is not None and self._now() - self._good[1] > self._limit_s

    def _poll(self) -> None:
        assert self._checkpoints is not None
        if self._claim is not None:
            self._claim.touch()
        try:
            self._checkpoints.poll()
        except Exception as error:
            self._failed(error)

    def _settle(self, wait: Callable[[], None]) -> None:
        """Wait for what is being written, and note how it went."""
        try:
            wait()
        except Exception as error:
            self._failed(error)
            return
        if self._pending is not None:
            self._good, self._pending, self._failure = self._pending, None, None

    def _failed(self, error: Exception) -> None:
        """Say that a checkpoint could not be written: at length the first time for each kind, then now and then."""
        self._pending, self._failure = None, describe(error)
        kind = _kind(error)
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if count == 1:
            warn(
                f"a checkpoint of {self._run.directory} could not be written: {self._failure}. Training goes on until "
                f"the last good one is {self._limit_s:,.0f} s old. {self._describe_good()}"
            )
        elif count & (count - 1) == 0:  # 2, 4, 8, ...
            age_s = self._now() - self._good[1]
            warn(
                f"checkpoints of {self._run.directory} could not be written {count} times: {self._failure}. "
                f"The last good one: {age_s:,.0f} s ago."
            )

    def _describe_good(self) -> str:
        steps, _ = self._good
        if steps is None:
            return "There is no earlier checkpoint."
        return f"The last good one is of {steps:,} steps: podracer resume {self._run.directory}"


def describe(error: Exception) -> str:
    """Why something could not be written, in a few words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())
    found = REASONS.search(text)
    return found[0] if found else f"{type(error).__name__}: {text[:200]}"


def _kind(error: Exception) -> str:
    """The same for failures of a kind: the texts of buckets and their libraries differ each time."""
    found = REASONS.search(str(error))
    return found[0] if found else type(error).__name__
