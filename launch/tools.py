"""Other people's programs, called by their words: gcloud, kubectl, sbatch. Nothing here goes through a shell.

They bring the user's own credentials; none is asked for, kept or printed, and no environment variable is put on a
command line.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from launch import remote
from launch.words import say
from podracer.errors import UserError

INSTALL = {
    "gcloud": "Install the Google Cloud CLI (https://cloud.google.com/sdk/docs/install), then `gcloud auth login`",
    "kubectl": "Install kubectl (https://kubernetes.io/docs/tasks/tools) and point it at the cluster",
    "sbatch": "Run this on a login node of the Slurm cluster",
    "git": "Install git",
}


# A connection that has died without a word (a laptop that slept) breaks off after two minutes.
KEEP_ALIVE = ("-o ServerAliveInterval=30", "-o ServerAliveCountMax=4")


class ToolFailed(RuntimeError):
    """A program ended with an error: its own words, and the command as typed."""

    def __init__(self, words: Sequence[str], status: int, text: str):
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        self.final = remote.FAILED in lines  # a host was reached, and cannot do it
        lines = [line for line in lines if line != remote.FAILED]
        # gcloud writes what is wrong in the line that begins so, and advice after it.
        error = next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "no message")
        short = shlex.join(word if len(word) < 80 else f"{word[:60].splitlines()[0]}..." for word in words)
        super().__init__(f"{short} ended with status {status}: {error}")
        self.status = status
        # A resource, not a machine's name: that may be found again.
        # The last is of a folder in a bucket.
        said = ("NOT_FOUND", "was not found", "Did not find existing container", "not found: 404")
        self.says_not_found = any(words in text for words in said)
        self.says_exists = any(words in text for words in ("ALREADY_EXISTS", "already exists"))


class Tools:
    """Runs programs, or with `dry_run` only shows the commands."""

    def __init__(self, dry_run: bool = False):
        self.dry_run = dry_run

    def show(self, words: Sequence[str], stdin: str | None = None) -> None:
        """The command as one would type it; in a dry run on stdout, that it may be kept."""
        line = shlex.join(words) + (" < manifest.yaml" if stdin is not None else "")
        print(line, flush=True) if self.dry_run else say(f"+ {line}")

    def run(self, words: Sequence[str], stdin: str | None = None) -> str:
        """What the program says on stdout; nothing in a dry run.

        Raises:
          ToolFailed: it ended with an error.
          UserError: there is no such program.
        """
        self.show(words, stdin)
        return "" if self.dry_run else self.ask(words, stdin)

    def ask(self, words: Sequence[str], stdin: str | None = None) -> str:
        """As `run`, without showing the command, and also in a dry run: for questions."""
        require(words[0])
        done = subprocess.run(list(words), input=stdin, capture_output=True, text=True, errors="replace")
        if done.returncode:
            raise ToolFailed(words, done.returncode, done.stderr or done.stdout)
        return done.stdout

    def ask_json(self, words: Sequence[str]) -> Any:
        """The answer as data; None where the thing asked about does not exist."""
        try:
            return json.loads(self.ask([*words, "--format=json"]) or "null")
        except ToolFailed as error:
            if error.says_not_found:
                return None
            raise
        except ValueError:
            raise ToolFailed(words, 0, "its answer is not JSON") from None

    def run_all(self, commands: Sequence[Sequence[str]]) -> list[str]:
        """Several at once; their outputs in order.

        Raises:
          ToolFailed: the first one that ended with an error, after all have ended.
        """
        for words in commands:
            self.show(words)
        return ["" for _ in commands] if self.dry_run else self.ask_all(commands)

    def ask_all(self, commands: Sequence[Sequence[str]]) -> list[str]:
        """As `run_all`, without showing the commands."""
        for program in {words[0] for words in commands}:
            require(program)
        pipe = subprocess.PIPE
        options: dict[str, Any] = {"stdout": pipe, "stderr": pipe, "text": True, "errors": "replace"}
        processes = [subprocess.Popen(list(each), **options) for each in commands]
        answers = [process.communicate() for process in processes]
        for words, process, (out, err) in zip(commands, processes, answers, strict=True):
            if process.returncode:
                raise ToolFailed(words, process.returncode, err or out)
        return [out for out, _ in answers]

    def stream(self, words: Sequence[str], each_line: Callable[[str], None]) -> None:
        """Give every line of output to `each_line` as it comes.

        Raises:
          ToolFailed: it ended with an error.
        """
        require(words[0])
        with tempfile.TemporaryFile() as errors:
            pipe = subprocess.PIPE
            with subprocess.Popen(list(words), stdout=pipe, stderr=errors, text=True, errors="replace") as process:
                assert process.stdout is not None
                for line in process.stdout:
                    each_line(line.rstrip("\n"))
            if process.returncode:
                errors.seek(0)
                raise ToolFailed(words, process.returncode, errors.read().decode(errors="replace"))


def require(program: str) -> None:
    """Refuse to go on without a program.

    Raises:
      UserError: it is not on the PATH; says what to install.
    """
    if shutil.which(program) is None:
        raise UserError(f"{program} is not installed. {INSTALL[program]}; --dry-run works without it.")
