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
from typing import Any

from launch import figures, results, turns
from launch.parse import parse, take_options
from launch.points import WEAK, Options, Shape, shapes, team, to_trace
from podracer import mesh, plot_speed
from podracer.errors import UserError, check_divides, check_number


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
    content = {"figure": "scaling", "kind": kind, "settings": dataclasses.asdict(options), "recipe": recipe}
    content |= {"topology": topology, "rows": compared, **figures.by_point(good), **facts}
    first = min(compared, key=lambda row: (row["baseline"], row["cores"], row["hosts"]))
    steps = first["environments"] * options.unroll_length
    content |= figures.headline(first["steps_per_s_median"], first["cores"], steps)
    if facts["first_process"]:
        results.write(pathlib.Path(options.out), compared, content, draw([content, *others]))


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


def row(kind: str, shape: Shape, measured: turns.Measured, facts: dict[str, Any]) -> dict[str, Any]:
    """A line of the table; `steps_per_s` and `cpu_us_per_step` are by round, until they are compared."""
    hosts = facts["processes"]  # of a slice, where this command was started on each of them
    where = {"kind": kind, "device": facts["device_kind"], "hosts": shape.hosts * hosts, "cores": shape.total * hosts}
    where |= {"environments": shape.environments * hosts, "baseline": shape.baseline, "rounds": len(measured.blocks)}
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
