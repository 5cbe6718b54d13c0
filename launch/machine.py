"""Where a command runs, and what all commands do around what they call."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, Literal

from launch.compiled import use_compilation_cache
from launch.parse import parse
from podracer import config, hosts, mesh, plugins
from podracer.errors import UserError, check_number

Platform = Literal["cpu", "gpu", "tpu"]


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where a command runs."""

    cores: str = "auto"
    """How many cores; auto takes all of an accelerator, or one virtual core per physical core of a CPU."""
    platform: Platform | None = None
    """cpu, gpu or tpu; None takes what is there."""

    def start(self) -> int | None:
        """Start JAX; the number of cores, or None for all."""
        number = None
        if self.cores != "auto":
            if not self.cores.isdigit():
                raise UserError(f"--cores is '{self.cores}'; expected auto or a number. Leave it out for all cores.")
            number = int(self.cores)
            check_number("--cores", number, minimum=1)
        mesh.start_backend(self.platform, number)
        use_compilation_cache()
        return number


@dataclasses.dataclass(frozen=True)
class Machines(Machine):
    """Where a run trains: on this machine, or on several that find together. Launchers set what is not given."""

    coordinator: str | None = None
    """HOST:PORT of the first of several hosts; None: found out on Cloud TPU, GKE and Slurm, else there is one host."""
    hosts: int | None = None
    """How many hosts train together; 1 looks for no others."""
    host: int | None = None
    """Which of them this is, from 0."""
    hosts_timeout: float = 300.0
    """Seconds to wait for the other hosts at the start."""

    def start(self) -> int | None:
        """Find the other hosts, and start JAX; the number of cores of each host, or None for all."""
        hosts.connect(self.coordinator, self.hosts, self.host, self.hosts_timeout)
        number = super().start()
        if hosts.count() > 1:
            import jax

            hosts.agree({"platform": jax.default_backend(), "cores of the host": jax.local_device_count()})
        return number


def run_directory(arguments: list[str], command: str, kind: type, text: str) -> tuple[pathlib.Path, list[str]]:
    """The RUN of a command and its other arguments; `--help` prints and exits."""
    if {"-h", "--help"} & set(arguments):
        parse(kind, ["--help"], f"podracer {command} RUN", text)
    if not arguments or arguments[0].startswith("-"):
        raise UserError(f"{command} needs a run directory; expected podracer {command} RUN [OPTIONS].")
    directory = pathlib.Path(arguments[0])
    config.read(directory)
    return directory, arguments[1:]


def with_blame(references: list[str | None], function: Any) -> Any:
    """Call `function`; an exception that passes through a file of the user's becomes one that names their line."""
    try:
        return function()
    except UserError:
        raise
    except Exception as error:
        for reference in references:
            if reference is not None and plugins.passes_through(reference, error):
                with plugins.blame(reference):
                    raise
        raise
