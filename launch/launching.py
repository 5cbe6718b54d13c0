"""`podracer launch KIND [OPTIONS] -- COMMAND`: start a command on several hosts, here or elsewhere.

What all kinds share: the table of them, and what they do to the command, so that it can be started again and again.
It is quick to import: no JAX.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from launch.parse import default_directory, take
from podracer.errors import UserError, unknown

# Name -> the module whose `main(arguments)` does it, and what it does.
KINDS = {
    "local": ("launch.local", "several hosts on this machine: one process each, with virtual CPU cores"),
    "tpu-vm": ("launch.tpu_vm", "on a Cloud TPU slice, with gcloud: create, install, start, follow, fetch, delete"),
    "gke": ("launch.gke", "as a JobSet on Google Kubernetes Engine, with its Dockerfile"),
    "slurm": ("launch.slurm", "as an sbatch script, one task per node"),
}

USAGE = (
    "usage: podracer launch KIND [OPTIONS] -- COMMAND\n\nStart `podracer COMMAND` (train or resume) on several hosts."
)
COMMANDS = ("train", "resume")
OWN = ("coordinator", "hosts", "host")  # flags of a command that the launchers set


def main(arguments: list[str]) -> None:
    """`podracer launch KIND [OPTIONS] -- COMMAND`."""
    if not arguments or arguments[0] in ("-h", "--help"):
        kinds = "\n".join(f"  {name:<9} {text}" for name, (_, text) in KINDS.items())
        print(f"{USAGE}\n\n{kinds}\n\n`podracer launch KIND --help` lists the options of each.")
        return
    if arguments[0] not in KINDS:
        raise unknown("kind of launch", arguments[0], KINDS, f"Expected {' or '.join(KINDS)}.")
    importlib.import_module(KINDS[arguments[0]][0]).main(arguments[1:])


def split(arguments: Sequence[str], kind: str) -> tuple[list[str], list[str]]:
    """The launcher's own options, and the command after `--`; with `--help` among the options there may be none.

    Raises:
      UserError: there is no command, or one that cannot be launched.
    """
    example = f"podracer launch {kind} -- train anakin --env catch"
    options, command = list(arguments), []
    if "--" in arguments:
        at = list(arguments).index("--")
        options, command = list(arguments[:at]), list(arguments[at + 1 :])
    if {"-h", "--help"} & set(options):
        return options, command
    if not command:
        raise UserError(f"launch {kind} has no command; expected one after --, for example: {example}")
    if command[0] not in COMMANDS:
        raise UserError(f"'{command[0]}' cannot be launched; expected {' or '.join(COMMANDS)}. For example: {example}")
    refuse_own(command)
    return options, command


def refuse_own(command: Sequence[str]) -> None:
    """Refuse a command that sets what the launcher, or the cluster, says to each host.

    Raises:
      UserError: it does.
    """
    for name in OWN:
        if take(list(command), name)[0] is not None:
            raise UserError(f"--{name} is set by the launcher; expected a command without it. Remove it.")


def with_directory(command: Sequence[str]) -> list[str]:
    """The command with a `--run`, which all hosts and all restarts then share."""
    if command[0] != "train" or take(list(command), "run")[0] is not None or {"-h", "--help"} & set(command):
        return list(command)
    env, agent = (take(list(command), name, default)[0] for name, default in (("env", "env"), ("agent", "agent")))
    return [*command, "--run", str(default_directory(str(env), str(agent)))]


def repeatable(command: Sequence[str]) -> list[str]:
    """The command, so that it goes on with its run where there is a checkpoint: what a restart starts."""
    command = with_directory(command)
    return command if command[0] != "train" or "--or-resume" in command else [*command, "--or-resume"]
