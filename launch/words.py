"""What the launchers share: the training command after `--`, and the names that they are given.

What is launched is always `podracer train ... --run DIRECTORY --or-resume`, one process per host: started again, it
goes on from its newest checkpoint, so that a restart needs to know nothing.
"""

from __future__ import annotations

import re
import sys
from typing import NamedTuple

from launch.launching import refuse_own
from launch.slices import Slice
from podracer.errors import UserError

ARCHITECTURES = ("anakin", "sebulba")
OWN = ("--run", "--or-resume")  # flags of `train` that the launcher sets, from --name


class Form(NamedTuple):
    """What a flag may be: nothing that means something to a shell."""

    pattern: str
    words: str  # the same for people, with an example


# What Google Cloud, Kubernetes and Slurm all take.
NAME = Form(
    r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", "small letters, digits and -, beginning with a letter, at most 40, as in run-1"
)


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The launcher's options, and the words after `--`."""
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def training_command(words: list[str], run: str) -> list[str]:
    """The words of the command that each host runs.

    Raises:
      UserError: they are not a training command, or set what the launcher sets.
    """
    words = words[1:] if words[:1] == ["podracer"] else words
    if words[:1] != ["train"] or len(words) < 2 or words[1] not in ARCHITECTURES:
        got = f"'{' '.join(words[:2])}'" if words else "nothing"
        raise UserError(
            f"after -- there is {got}; expected train anakin or train sebulba with its options. "
            "Write: podracer launch KIND [OPTIONS] -- train sebulba --env atari/Pong"
        )
    refuse_own(words)
    for flag in OWN:
        if any(word.partition("=")[0] == flag for word in words):
            raise UserError(f"{flag} is set by the launcher, from --name. Leave it out after --.")
    broken = [word for word in words if any(ord(letter) < 32 for letter in word)]
    if broken:
        raise UserError(f"{broken[0]!r} holds a control character; expected plain words after --. Remove it.")
    return ["podracer", *words, "--run", run, "--or-resume"]


def check_name(flag: str, value: str, form: Form = NAME) -> str:
    """`value`, where it can be part of names of resources, files and commands.

    Raises:
      UserError: it holds anything else, such as characters that mean something to a shell.
    """
    if not re.fullmatch(form.pattern, value):
        raise UserError(f"{flag} is {value!r}; expected {form.words}. Change {flag}.")
    return value


def check_bucket(value: str | None) -> str | None:
    """The name of the bucket `gs://NAME`, or None.

    Raises:
      UserError: it is not such a name.
    """
    if value is None:
        return None
    match = re.fullmatch(r"gs://([a-z0-9][a-z0-9._-]{1,61}[a-z0-9])/?", value)
    if match is None:
        raise UserError(f"--bucket is {value!r}; expected gs://NAME, without a folder. Change --bucket.")
    return match[1]


def needs_bucket(piece: Slice) -> str:
    """What is missing where a run on a slice has no bucket."""
    return (
        f"--bucket is missing; the {piece.hosts} hosts of {piece.name} need a run directory that all of them see. "
        "Give --bucket gs://NAME (gcloud storage buckets create gs://NAME makes one)."
    )


def say(text: str) -> None:
    """A line about the launch; what a command prints for others to read goes to stdout, this does not."""
    print(text, file=sys.stderr, flush=True)
