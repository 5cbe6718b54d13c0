"""`podracer bench scaling`: throughput against the number of cores.

Three kinds of points, of which a picture shows one:

- devices: cores of an accelerator. Weak scaling: every core has its own environments.
- pinned: CPU processes, each pinned to a physical core of its own, that train together. Weak scaling, too.
- virtual: cores that JAX makes out of one CPU. They share its processors, so that more of them cannot be faster: what
  is drawn is the overhead at constant total work, in CPU time, against the best that a single core does.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import socket
from typing import Any, NamedTuple

from launch import figures, turns
from launch.figures import Workload
from launch.parse import parse, take_options
from launch.worker import Task
from podracer import mesh, plot_speed
from podracer.errors import UserError, check_divides, check_number

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


def main(arguments: list[str]) -> None:
    """`podracer bench scaling [OPTIONS]`."""
    text = "Measure throughput against the number of cores: weak scaling, or overhead where the cores are virtual."
    env_options, arguments = take_options(arguments, "env")
    agent_options, arguments = take_options(arguments, "agent")
    options = parse(Options, arguments, "podracer bench scaling", text)
    options.check()
    check_number("--batch-size", options.batch_size, minimum=1)
    check_number("--actor-fraction", options.actor_fraction, minimum=0, maximum=1)
    cores, hosts = figures.numbers("--cores", options.cores), figures.numbers("--hosts", options.hosts)
    check_pinned(options, cores, hosts)
    recipe = figures.recipe(options, env_options, agent_options)
    others = [read(pathlib.Path(name.strip())) for name in options.also.split(",") if name.strip()]

    # Whether cores are real is known only where JAX has started, and that is not here: one process holds a TPU.
    on_cpu = "pinned" if options.pinned else "virtual"
    traced = {kind: to_trace(kind, options, recipe, cores, hosts) for kind in (on_cpu, "devices")}
    facts = figures.look(traced[on_cpu], traced["devices"])
    kind = on_cpu if facts["platform"] == "cpu" else "devices"
    check_kind(kind, options, facts, others)
    plan = shapes(kind, options, cores, hosts)
    found = figures.measure(
        {shape.name: team(options, recipe, shape) for shape in plan}, options.rounds, alone=kind == "devices"
    )
    good = figures.whole(found)
    rows = [row(kind, shape, good[shape.name], facts) for shape in plan if shape.name in good]
    compared = overheads(rows) if kind == "virtual" else efficiencies(rows)
    topology = {"hosts": hosts, "cores": cores, "physical_cores": mesh.physical_cores(), "cpus": mesh.cpus()}
    samples = {name: measured.blocks for name, measured in good.items()}
    content = {"figure": "scaling", "kind": kind, "settings": dataclasses.asdict(options), "recipe": recipe}
    content |= {"topology": topology, "rows": compared, "samples": samples, **facts}
    if facts["first_process"]:
        figures.write(pathlib.Path(options.out), compared, content, draw([content, *others]))


def check_pinned(options: Options, cores: list[int], hosts: list[int]) -> None:
    """Refuse what a pinned measurement cannot be.

    Raises:
      UserError: there are too few physical cores, say.
    """
    if not options.pinned:
        return
    if hosts != [1]:
        raise UserError("--hosts and --pinned: every pinned core is a process already. Leave --hosts out.")
    if options.platform not in (None, "cpu"):
        raise UserError(f"--pinned is for CPUs; the platform is {options.platform}. Leave --pinned out.")
    if cores[-1] > mesh.physical_cores():
        raise UserError(
            f"--pinned with --cores {options.cores}, but there are {mesh.physical_cores()} physical cores. "
            "Choose at most that many."
        )
    if options.architecture == "sebulba":
        check_divides("--batch-size", options.batch_size, "actor threads of a core", options.threads_per_core)


def check_kind(kind: str, options: Options, facts: dict[str, Any], others: list[dict[str, Any]]) -> None:
    """Refuse what does not go with the cores that there are.

    Raises:
      UserError: several hosts of an accelerator, or files of another kind of points.
    """
    if kind == "devices" and options.hosts != "1":
        raise UserError(
            f"--hosts is {options.hosts} on {facts['platform']}: a command cannot start the hosts of a slice. "
            "Run it on slices of several sizes, and give the .json files of the others to --also."
        )
    for other in others:
        if other["kind"] != kind or kind not in WEAK:
            raise UserError(
                f"--also has a file of {other['kind']} cores, and this measures {kind} ones. Only measurements of "
                "devices, or of pinned cores, can be in one picture. Leave --also out."
            )


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


def row(kind: str, shape: Shape, measured: turns.Measured, facts: dict[str, Any]) -> dict[str, Any]:
    """A line of the table; `steps_per_s` and `cpu_us_per_step` are by round, until they are compared."""
    where = {"kind": kind, "device": facts["device_kind"], "hosts": shape.hosts, "cores": shape.total}
    where |= {"environments": shape.environments, "baseline": shape.baseline, "rounds": len(measured.blocks)}
    where |= {"measurement": facts["started"]}
    return {**where, **figures.columns(measured, facts["frame_skip"]), "samples": figures.samples(measured)}


def efficiencies(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With the throughput per core against that of the smallest point, round by round."""
    base = min(rows, key=lambda row: row["cores"])
    compared = []
    for row in rows:
        pairs = zip(row["samples"]["steps_per_s"], base["samples"]["steps_per_s"], strict=False)
        ratios = [(mine / row["cores"]) / (its / base["cores"]) for mine, its in pairs]
        compared.append(_plain(row) | figures.spread("efficiency", ratios))
    return compared


def overheads(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With the CPU time of a step against that of the best single core, round by round."""
    singles = [row for row in rows if row["cores"] == 1 and row["hosts"] == 1]
    if not singles:
        raise UserError("no single core could be measured, which overhead is counted against. Measure smaller points.")
    best = min(singles, key=lambda row: row["cpu_us_per_step_median"])
    compared = []
    for row in rows:
        pairs = zip(row["samples"]["cpu_us_per_step"], best["samples"]["cpu_us_per_step"], strict=False)
        ratios = [mine / its - 1 for mine, its in pairs]
        compared.append(
            _plain(row) | {"against_environments": best["environments"]} | figures.spread("overhead", ratios)
        )
    return compared


def read(path: pathlib.Path) -> dict[str, Any]:
    """What an earlier measurement wrote.

    Raises:
      UserError: it is no such file.
    """
    try:
        content = json.loads(path.read_text())
        if content["figure"] == "scaling" and content["kind"] and content["rows"]:
            return content
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise UserError(f"--also has '{path}'; expected a .json that `podracer bench scaling` wrote. Change --also.")


def draw(contents: list[dict[str, Any]]) -> Any:
    """The picture of this measurement, and others of its kind."""
    first = contents[0]
    options, skip = Options(**first["settings"]), first["frame_skip"]
    unit = "frames" if skip > 1 else "steps"
    what = f"{figures.named(options)}, {options.architecture}"
    if first["kind"] == "virtual":
        processors = f"{first['topology']['physical_cores']} processors"
        return plot_speed.draw_overhead(first["rows"], unit, what, processors)
    lines = [(_line_name(content, contents), content["rows"]) for content in contents]
    merged: dict[str, list[dict[str, Any]]] = {}
    for name, rows in lines:
        merged.setdefault(name, []).extend(rows)
    per_core = f"{options.batch_size:,} environments per core"
    return plot_speed.draw_weak(merged, unit, f"{what}: weak scaling, {per_core}", first["kind"] == "pinned")


def _line_name(content: dict[str, Any], contents: list[dict[str, Any]]) -> str:
    """What tells a measurement from the others in the picture; equal ones are one line."""
    kind = "pinned CPU cores" if content["kind"] == "pinned" else content["device_kind"]
    options = Options(**content["settings"])
    described = [(figures.named(each), each.batch_size) for each in (Options(**c["settings"]) for c in contents)]
    if len(set(described)) > 1:
        return f"{figures.named(options)}, {options.batch_size:,} per core, {kind}"
    return kind


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "samples"}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
