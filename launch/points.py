"""The points of `podracer bench scaling`: how many cores and environments, and the processes that measure them."""

from __future__ import annotations

import dataclasses
import socket
from typing import Any, NamedTuple

from launch.figures import Workload
from launch.worker import Task
from podracer import mesh
from podracer.errors import UserError, check_divides

WEAK = ("devices", "pinned")


@dataclasses.dataclass(frozen=True)
class Options(Workload):
    """Options of `bench scaling`."""

    cores: str = "1,2,4,8"
    """Cores of each host, one point each."""
    hosts: str = "1"
    """Processes of so many cores that train together, one line each; on a CPU, as on a slice each host is started."""
    pinned: bool = False
    """On a CPU: every core is a process of its own, pinned to a physical core."""
    batch_size: int = 1024
    """Environments: per core on an accelerator and with --pinned, in total on virtual cores."""
    actor_fraction: float = 0.5
    """Sebulba: the part of the cores that acts; at least one acts and one learns, and a single core does both."""
    also: str = ""
    """Files .json of other measurements to draw with this one, with commas: other slices, other machines."""
    out: str = "scaling.png"
    """Picture to write, .png, .svg or .pdf; the numbers go beside it as .csv, versions and raw samples as .json."""


class Shape(NamedTuple):
    """A point of the figure."""

    hosts: int  # processes
    cores: int  # of each
    environments: int  # in total
    baseline: bool = False  # a single core, for comparison only

    @property
    def total(self) -> int:
        return self.hosts * self.cores

    @property
    def name(self) -> str:
        cores = f"{self.total} core{'s' if self.total > 1 else ''}"
        return f"{cores} of {self.hosts} processes" if self.hosts > 1 else f"{cores}, {self.environments} environments"


def shapes(kind: str, options: Options, cores: list[int], hosts: list[int]) -> list[Shape]:
    """All points, and for virtual cores what a single core does with smaller batches.

    The work of one of N virtual cores is that of a single core with an N-th of the environments, and caches may make
    that cheaper than one large batch: the best of them is what overhead is counted against.

    Raises:
      UserError: the environments do not divide.
    """
    if options.pinned:
        plan = [Shape(count, 1, count * options.batch_size) for count in cores]
    elif kind in WEAK:
        plan = [Shape(h, c, h * c * options.batch_size) for h in hosts for c in cores]
    else:
        plan = [Shape(h, c, options.batch_size) for h in hosts for c in cores]
    name = "--batch-size" if kind == "virtual" else "--batch-size times cores"
    for shape in plan:
        among = "cores" if options.architecture == "anakin" else "actor threads"
        check_divides(name, shape.environments, among, parts(options, shape))
    if kind != "virtual":
        return plan
    per_core = sorted({shape.environments // shape.total for shape in plan}, reverse=True)
    threads = options.threads_per_core if options.architecture == "sebulba" else 1
    singles = [Shape(1, 1, size, True) for size in per_core if size % threads == 0]
    return plan + [shape for shape in singles if shape._replace(baseline=False) not in plan]


def to_trace(
    kind: str, options: Options, recipe: dict[str, Any], cores: list[int], hosts: list[int]
) -> list[Task] | str:
    """What is built and traced before anything is measured, a host of each point; or what is wrong with the plan."""
    try:
        plan = shapes(kind, options, cores, hosts)
    except UserError as error:
        return str(error)
    return [dataclasses.replace(task(options, recipe, shape), hosts=1) for shape in plan]


def actor_cores(options: Options, shape: Shape) -> int:
    """Of each process."""
    return min(max(1, int(shape.cores * options.actor_fraction)), max(shape.cores - 1, 1))


def parts(options: Options, shape: Shape) -> int:
    """Among how many cores (Anakin) or actor threads (Sebulba) the environments are divided."""
    if options.architecture == "anakin":
        return shape.total
    return shape.hosts * actor_cores(options, shape) * options.threads_per_core


def task(options: Options, recipe: dict[str, Any], shape: Shape) -> Task:
    """One process of a point."""
    settings = options.settings(shape.environments // parts(options, shape), actor_cores(options, shape))
    return Task(
        options.architecture,
        recipe,
        settings,
        shape.cores,
        "cpu" if options.pinned else options.platform,
        seconds=options.seconds,
        hosts=shape.hosts,
    )


def team(options: Options, recipe: dict[str, Any], shape: Shape) -> list[Task]:
    """All processes of a point."""
    coordinator = f"127.0.0.1:{_free_port()}" if shape.hosts > 1 else ""
    cpus = mesh.cpus() if options.pinned else []
    one = task(options, recipe, shape)
    return [
        dataclasses.replace(one, host=host, coordinator=coordinator, cpus=tuple(cpus[host : host + 1]))
        for host in range(shape.hosts)
    ]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
