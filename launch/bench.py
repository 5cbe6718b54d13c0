"""`podracer bench`: figures of speed, each a picture with its numbers beside it."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from launch import cost, predict, results
from launch.machine import Machine, with_blame
from launch.parse import parse, take_options
from launch.training import build
from podracer import config, envs, plot, presets, runs
from podracer.errors import UserError, check_number, closest


@dataclasses.dataclass(frozen=True)
class SebulbaOptions(Machine):
    """Options of `bench sebulba`."""

    env: str = "atari/Pong"
    """Environment: a name of `podracer envs`, or path.py:Object. --env.OPTION VALUE sets its options."""
    agent: str = "impala"
    """Agent: a name of `podracer agents`, or path.py:Object; with its preset for this environment, if there is one."""
    network: str | None = None
    """Network: a name such as impala, or path.py:Object; None takes nature for pictures, else the agent's own."""
    batch_sizes: str = "16,32,64,128"
    """Environments per actor thread, one measurement each."""
    unroll_lengths: str = "20,60"
    """Decisions per trajectory, one line of the picture each."""
    seconds: float = 5.0
    """Length of each measurement; whole updates, at least one."""
    rounds: int = 3
    """How often everything is measured, in turns."""
    actor_cores: int = 1
    """Cores that choose actions; the others learn."""
    threads_per_core: int = 2
    """Actor threads per actor core."""
    lag: str = "fixed"
    """Updates between acting and learning, as in `train sebulba`."""
    out: str = "bench-sebulba.png"
    """Picture to write, .png, .svg or .pdf; the numbers go beside it as .csv, the versions as .json."""


def sebulba(arguments: list[str]) -> None:
    """`podracer bench sebulba [OPTIONS]`: throughput against actor batch size, figure 4b of the Podracer paper."""
    from sebulba import measure
    from sebulba.loop import Lag, Sebulba
    from sebulba.topology import split

    text = "Measure Sebulba's throughput against the batch size of its actor threads."
    env_options, arguments = take_options(arguments, "env")
    options = parse(SebulbaOptions, arguments, "podracer bench sebulba", text)
    sizes, lengths = (_numbers(options, name) for name in ("batch_sizes", "unroll_lengths"))
    check_number("--seconds", options.seconds, minimum=0, exclusive=True)
    check_number("--rounds", options.rounds, minimum=1)
    lag, out = Lag.parse(options.lag), pathlib.Path(options.out)
    plot.check_out(out)
    maker = config.agent_maker(options.agent)
    network = None if options.network is None else config.network_recipe(options.network)
    references = [options.env, options.agent, options.network]
    cores = options.start()

    given, preset = config.default_of(maker, "config"), presets.find(options.env, options.agent)
    if preset is not None:
        given = dataclasses.replace(given, **preset[1].config)
    env, agent = with_blame(references, lambda: build(references, "sebulba", env_options, maker, given, network))

    def make_loop(batch_size: int, unroll_length: int) -> Sebulba:
        topology = split(cores, options.actor_cores, options.threads_per_core, batch_size)
        return Sebulba(agent, envs.on_host(env, batch_size), topology, unroll_length, lag)

    topology = make_loop(sizes[0], lengths[0]).topology
    found = with_blame(
        references, lambda: measure.figure(make_loop, sizes, lengths, options.seconds, options.rounds, _say)
    )
    skip, facts = env.spec.frame_skip, runs.environment_facts(topology.learner_mesh)
    content = {"settings": dataclasses.asdict(options), "env_options": env_options, "num_cores": topology.num_cores}
    content |= {"agent_config": agent.config, "network": agent.network}
    title = f"{options.agent} on {options.env}, {topology.num_cores} core{'s' if topology.num_cores > 1 else ''}"
    results.write(out, _rows(found, options.rounds, skip), content | facts, _draw(found, skip, title))


FIGURES: dict[str, tuple[Callable[[list[str]], None], str]] = {
    "sebulba": (sebulba, "throughput of Sebulba against the batch size of its actor threads"),
    "cost": (cost.main, "dollars and hours for 200 M frames, from a measurement, beside the paper's"),
    "predict": (predict.main, "how a measured core would scale on a TPU slice: a model, beside published points"),
}


def main(arguments: list[str]) -> None:
    """`podracer bench FIGURE [OPTIONS]`."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: podracer bench {{{','.join(FIGURES)}}} [OPTIONS]\n")
        for name, (_, text) in FIGURES.items():
            print(f"  {name:<9} {text}")
        print("\n`podracer bench FIGURE --help` lists the options of each.")
        return
    name = arguments[0]
    if name not in FIGURES:
        raise UserError(f"unknown figure '{name}'.{closest(name, FIGURES)} Expected {' or '.join(FIGURES)}.")
    FIGURES[name][0](arguments[1:])


def _numbers(options: Any, name: str) -> list[int]:
    """`16,32` as numbers, each once, in order."""
    flag, text = f"--{name.replace('_', '-')}", getattr(options, name)
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() and int(word) for word in words):
        raise UserError(f"{flag} is '{text}'; expected whole numbers >= 1 with commas, such as 16,32. Change {flag}.")
    return sorted({int(word) for word in words})


def _rows(found: Any, rounds: int, frame_skip: int) -> list[dict[str, Any]]:
    """The lines of the CSV: training at each batch size and unroll length, and the environments alone."""

    def row(what: str, batch_size: int, unroll_length: int | str, speed: Any) -> dict[str, Any]:
        shape = {"what": what, "batch_size": batch_size, "unroll_length": unroll_length, "rounds": rounds}
        steps = {f"steps_per_s_{name}": value for name, value in speed._asdict().items()}
        return shape | steps | {f"frames_per_s_{name}": value * frame_skip for name, value in speed._asdict().items()}

    rows = [row("training", *point) for point in found.training]
    return rows + [row("environments alone", size, "", speed) for size, speed in found.ceiling.items()]


def _draw(found: Any, frame_skip: int, title: str) -> Any:
    """Frames per second against batch size, a line per unroll length, and the ceiling; medians, from low to high."""
    lines: dict[str, dict[int, Any]] = {}
    for point in found.training:
        lines.setdefault(f"unroll {point.unroll_length}", {})[point.batch_size] = point.steps_per_s
    dashed = "environments alone"
    lines[dashed] = found.ceiling
    spreads = {
        name: (list(line), [[frame_skip * value for value in speed] for speed in line.values()])
        for name, line in lines.items()
    }
    unit = "frames per second" if frame_skip > 1 else "steps per second"
    return plot.draw_spreads(spreads, "environments per actor thread", unit, title, dashed)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
