"""`podracer launch slurm --name NAME --hosts N [OPTIONS] -- train ...`."""

from __future__ import annotations

import dataclasses
import shlex
import sys

from launch import manifest, rehearsal
from launch.parse import parse
from launch.tools import ToolFailed, Tools
from launch.words import Form, check_name, say, split, training_command
from podracer import exits
from podracer.errors import check_number

WORD = Form(r"[A-Za-z0-9._-]+", "letters, digits, ., _ and -, as in gpu_long")
TIME = Form(r"(\d+-)?\d{1,2}(:\d{2}){1,2}|\d+", "minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS:MINUTES, as in 04:00:00")
FOLDER = Form(r"[A-Za-z0-9._/-]+", "a path of letters, digits, ., _ and -, as in /shared/run1")
GRES = Form(r"[A-Za-z0-9._:,-]+", "resources as Slurm writes them, as in gpu:8")
AGAIN = (exits.INTERNAL, exits.PEER_LOST, exits.STALLED, exits.PREEMPTED, exits.ABORTED, 137)  # worth restarting

_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={hosts}
#SBATCH --ntasks-per-node=1
{extra}#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={name}-%j.log
# A minute before the end of its time each task gets SIGTERM, saves, and ends with status {preempted}.
#SBATCH --signal=TERM@60

# JAX finds the other hosts by Slurm's own variables. One host that fails lets the others see it and save.
# srun ends with the highest status of all hosts: one that ends for good ({final}) says so in a file.
final={name}-$SLURM_JOB_ID.final
rm -f "$final"
srun --kill-on-bad-exit=0{srun} sh -c '
  trap : TERM  # which is for the program, and reaches this shell, too
  final=$1; shift; "$@"; status=$?
  case $status in {final}) echo "$status" > "$final" ;; esac
  exit $status' sh "$final" {command}
status=$?
if [ -s "$final" ]; then
  status=$(tail -n 1 "$final")
  rm -f "$final"
fi

# The same command again goes on from the newest checkpoint; bad input ({bad_input}) would only fail again.
case $status in
  {again})
    if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {max_restarts} ]; then
      echo "status $status: requeued, restart $((${{SLURM_RESTART_COUNT:-0}} + 1)) of {max_restarts}"
      scontrol requeue "$SLURM_JOB_ID"
    fi
    ;;
esac
exit $status
"""


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `launch slurm`."""

    name: str
    """Name of the job and of the run."""
    hosts: int = 1
    """Nodes; each runs one process."""
    max_restarts: int = 3
    """How often the job is requeued: after pre-emption, the end of its time, or a failure; never after bad input."""
    run: str | None = None
    """Directory of the run, which all nodes see; None: runs/NAME in the folder of submission."""
    partition: str | None = None
    """Slurm partition."""
    account: str | None = None
    """Slurm account."""
    time: str | None = None
    """Time limit as Slurm writes it, such as 04:00:00."""
    gres: str | None = None
    """Resources per node, such as gpu:8."""
    cpus_per_task: int | None = None
    """CPUs per node."""
    out: str | None = None
    """Folder for NAME.sbatch; None prints it."""
    submit: bool = False
    """Submit it with sbatch."""
    dry_run: bool = False
    """With --submit, only print the command."""


def main(arguments: list[str]) -> None:
    """Render, and where asked for submit."""
    arguments, command = split(arguments)
    options = parse(Options, arguments, "podracer launch slurm", "Render an sbatch script, and submit it with sbatch.")
    _check(options)
    words = training_command(command, options.run or f"runs/{options.name}")
    rehearsal.check(words, rehearsal.Place(options.hosts))
    script = render(options, words)
    if not options.submit or options.out is not None:
        for path in manifest.write(options.out, {f"{options.name}.sbatch": script}):
            print(f"written: {path}")
    if options.submit:
        try:
            # sbatch reads a script from its input where no file is named.
            print(Tools(options.dry_run).run(["sbatch"], stdin=script), end="")
        except ToolFailed as error:
            say(f"podracer: {error}")
            sys.exit(1)


def render(options: Options, command: list[str]) -> str:
    """The script."""
    chosen = {
        "partition": options.partition,
        "account": options.account,
        "time": options.time,
        "gres": options.gres,
        "cpus-per-task": options.cpus_per_task,
    }
    extra = "".join(f"#SBATCH --{flag}={value}\n" for flag, value in chosen.items() if value is not None)
    return _SCRIPT.format(
        name=options.name,
        hosts=options.hosts,
        extra=extra,
        command=shlex.join(command),
        max_restarts=options.max_restarts,
        preempted=exits.PREEMPTED,
        bad_input=exits.BAD_INPUT,
        final=f"{exits.BAD_INPUT}|{exits.NOT_FINITE}",
        # Since Slurm 22.05 srun does not take it from the job.
        srun="" if options.cpus_per_task is None else f" --cpus-per-task={options.cpus_per_task}",
        again="|".join(map(str, AGAIN)),
    )


def _check(options: Options) -> None:
    check_name("--name", options.name)
    for flag, value, form in (
        ("--partition", options.partition, WORD),
        ("--account", options.account, WORD),
        ("--time", options.time, TIME),
        ("--gres", options.gres, GRES),
        ("--run", options.run, FOLDER),
    ):
        if value is not None:
            check_name(flag, value, form)
    check_number("--hosts", options.hosts, minimum=1)
    check_number("--max-restarts", options.max_restarts, minimum=0)
    check_number("--cpus-per-task", options.cpus_per_task, minimum=1)
