"""`podracer launch KIND [OPTIONS] -- train ...`: the same training command, on other machines."""

from __future__ import annotations

import importlib

from podracer.errors import UserError, closest

# Name -> the module whose `main(arguments)` does it, and what it does.
KINDS = {
    "tpu-vm": ("launch.tpu_vm", "on a Cloud TPU slice, with gcloud: create, install, start, follow, fetch, delete"),
    "gke": ("launch.gke", "as a JobSet on Google Kubernetes Engine, with its Dockerfile"),
    "slurm": ("launch.slurm", "as an sbatch script, one task per node"),
}


def main(arguments: list[str]) -> None:
    """`podracer launch KIND [OPTIONS] -- COMMAND`; the exit status is that of the run."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: podracer launch {{{','.join(KINDS)}}} [OPTIONS] -- train ARCHITECTURE [OPTIONS]\n")
        for name, (_, text) in KINDS.items():
            print(f"  {name:<9} {text}")
        print("\n`podracer launch KIND --help` lists the options of each; `--dry-run` shows what would be done.")
        return
    kind = arguments[0]
    if kind not in KINDS:
        raise UserError(f"unknown kind of launch '{kind}'.{closest(kind, KINDS)} Expected {' or '.join(KINDS)}.")
    importlib.import_module(KINDS[kind][0]).main(arguments[1:])
