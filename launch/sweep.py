"""`podracer bench sweep`: throughput against one setting, a line for each value of another.

The figures of the Podracer paper beside those over cores: Sebulba against the batch size of its actor threads (4b),
with what the environments alone do; MuZero against batch size and simulations.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, Literal, NamedTuple

from launch import figures, results, turns
from launch.figures import Workload
from launch.parse import parse, take_options
from launch.worker import Task
from podracer import plot_speed
from podracer.errors import UserError, check_number, closest

Axis = Literal["batch-size", "unroll-length", "num-simulations"]
AXES = ("batch-size", "unroll-length", "num-simulations")
BATCH = {"anakin": "environments per core", "sebulba": "environments per actor thread"}
ALONE = "environments alone"


@dataclasses.dataclass(frozen=True)
class Options(Workload):
    """Options of `bench sweep`."""

    axis: Axis = "batch-size"
    """What varies: batch-size, unroll-length or num-simulations (agents that search)."""
    values: str = "16,32,64,128"
    """Its values, with commas."""
    lines: str = ""
    """Another axis and its values, one line of the picture each: unroll-length=20,60."""
    cores: str = "auto"
    """How many cores; auto takes all of an accelerator, or one virtual core per physical core of a CPU."""
    batch_size: int = 64
    """Environments per core on Anakin, per actor thread on Sebulba, where they do not vary."""
    actor_cores: int = 1
    """Sebulba: cores that choose actions; the others learn."""
    out: str = "sweep.png"
    """Picture to write, .png, .svg or .pdf; the numbers go beside it as .csv, versions and raw samples as .json."""


class Point(NamedTuple):
    """What is measured: values by axis. Without any training, the environments alone."""

    values: dict[str, int]
    alone: bool = False

    @property
    def name(self) -> str:
        what = ", ".join(f"{axis} {value}" for axis, value in self.values.items())
        return f"{ALONE}, {what}" if self.alone else what


def main(arguments: list[str]) -> None:
    """`podracer bench sweep [OPTIONS]`."""
    text = "Measure throughput against a setting: batch size, unroll length or number of simulations."
    env_options, arguments = take_options(arguments, "env")
    agent_options, arguments = take_options(arguments, "agent")
    options = parse(Options, arguments, "podracer bench sweep", text)
    options.check()
    check_number("--batch-size", options.batch_size, minimum=1)
    check_number("--actor-cores", options.actor_cores, minimum=1)
    if options.cores != "auto" and not (options.cores.isdigit() and int(options.cores)):
        raise UserError(f"--cores is '{options.cores}'; expected auto or a number. Leave it out for all cores.")
    recipe = figures.recipe(options, env_options, agent_options)
    plan = points(options)
    tasks = {point.name: task(options, recipe, point) for point in plan}
    facts = figures.look(list(tasks.values()), list(tasks.values()))
    alone = facts["platform"] != "cpu"
    good = figures.whole(figures.measure({name: [each] for name, each in tasks.items()}, options.rounds, alone))
    rows = [row(point, good[point.name], facts) for point in plan if point.name in good]
    content = {"figure": "sweep", "settings": dataclasses.asdict(options), "recipe": recipe, "rows": rows}
    content |= figures.by_point(good) | facts
    content |= headline(options, rows, facts)
    if facts["first_process"]:
        results.write(pathlib.Path(options.out), rows, content, draw(options, rows, facts))


def points(options: Options) -> list[Point]:
    """All of them.

    Raises:
      UserError: an axis or a value cannot be.
    """
    values, axis, more = figures.numbers("--values", options.values), "", [0]
    if options.lines:
        axis, _, text = options.lines.partition("=")
        if axis not in AXES or axis == options.axis or not text:
            others = [name for name in AXES if name != options.axis]
            raise UserError(
                f"--lines is '{options.lines}'; expected another axis and its values, such as {others[-1]}=8,16."
                f"{closest(axis, others)} Change --lines."
            )
        more = figures.numbers("--lines", text)
    found = [
        Point({axis: line, options.axis: value} if axis else {options.axis: value}) for line in more for value in values
    ]
    if options.architecture == "sebulba" and options.axis == "batch-size":
        found += [Point({"batch-size": value}, alone=True) for value in values]
    return found


def task(options: Options, recipe: dict[str, Any], point: Point) -> Task:
    """What one process measures."""
    settings = options.settings(point.values.get("batch-size", options.batch_size), options.actor_cores)
    if "unroll-length" in point.values:
        settings["unroll_length"] = point.values["unroll-length"]
    if "num-simulations" in point.values:
        agent_config = {**(recipe["agent_config"] or {}), "num_simulations": point.values["num-simulations"]}
        recipe = {**recipe, "agent_config": agent_config}
    cores = None if options.cores == "auto" else int(options.cores)
    return Task(options.architecture, recipe, settings, cores, options.platform, point.alone, options.seconds)


def row(point: Point, measured: turns.Measured, facts: dict[str, Any]) -> dict[str, Any]:
    """A line of the table. Training is measured over all hosts, environments alone on one: as many times as much."""
    where: dict[str, Any] = {"what": ALONE if point.alone else "training"}
    where |= {column(axis): value for axis, value in point.values.items()} | {"rounds": len(measured.blocks)}
    found = figures.columns(measured, facts["frame_skip"])
    if point.alone:
        rates = [name for name in found if "_per_s_" in name]
        found |= {name: found[name] * facts["processes"] for name in rates}
    return where | found


def headline(options: Options, rows: list[dict[str, Any]], facts: dict[str, Any]) -> dict[str, Any]:
    """The fastest point of training; nothing where there is none."""
    trained = [each for each in rows if each["what"] != ALONE]
    if not trained:
        return {}
    best = max(trained, key=lambda row: row["steps_per_s_median"])
    cores = num_cores(options, facts)
    actors = options.threads_per_core * options.actor_cores * facts["processes"]
    batches = cores if options.architecture == "anakin" else actors
    steps = best.get("batch_size", options.batch_size) * best.get("unroll_length", options.unroll_length) * batches
    return figures.headline(best["steps_per_s_median"], cores, steps)


def num_cores(options: Options, facts: dict[str, Any]) -> int:
    """Of all hosts."""
    return facts["processes"] * (facts["local_devices"] if options.cores == "auto" else int(options.cores))


def column(axis: str) -> str:
    """The name of an axis in the table."""
    return axis.replace("-", "_")


def draw(options: Options, rows: list[dict[str, Any]], facts: dict[str, Any]) -> Any:
    """The picture."""
    unit = "frames" if facts["frame_skip"] > 1 else "steps"
    axis, line_axis = options.axis, options.lines.partition("=")[0]
    words = {
        "batch-size": BATCH[options.architecture],
        "unroll-length": "unroll length",
        "num-simulations": "simulations",
    }
    lines: dict[str, tuple[list[float], list[list[float]]]] = {}
    for each in rows:
        name = each["what"]
        if line_axis and name != ALONE:
            name = f"{words[line_axis]} {each[column(line_axis)]}"
        at, spreads = lines.setdefault(name, ([], []))
        at.append(each[column(axis)])
        spreads.append([each[f"{unit}_per_s_{which}"] for which in ("median", "low", "high")])
    return plot_speed.draw_spreads(lines, words[axis], f"{unit} per second", title(options, facts), ALONE)


def title(options: Options, facts: dict[str, Any]) -> str:
    """What was measured, and on what."""
    cores = num_cores(options, facts)
    fewer = "" if facts["platform"] != "cpu" else "virtual " if cores > facts["processors"] else ""
    plural = "s" if cores > 1 else ""
    return f"{figures.named(options)}, {options.architecture}, {cores} {fewer}{facts['device_kind']} core{plural}"
