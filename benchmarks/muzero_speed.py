"""Speed of MuZero on both architectures: prints tables, and draws throughput against batch and simulations.

    python benchmarks/muzero_speed.py
    python benchmarks/muzero_speed.py --only anakin/gumbel cores --rounds 5
    python benchmarks/muzero_speed.py --only sweep --out muzero.png

CartPole, 256 environments in total, 50 simulations, a network of layers of 64, one start of an unroll per decision.
Whole training beside its parts alone (acting, learning, and acting with as many calls of the model and no search: the
limit), and beside the same program with mctx's search. All rows of a table take turns; medians over the blocks. Wall
time needs a quiet machine, CPU seconds less so. `cores`: the same total work on more and more virtual cores. `sweep`:
acting and learning against the number of environments, one line per number of simulations (the figures of the Podracer
paper's section on MuZero), as CSV and PNG.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from pathlib import Path

from table_head import ROOT, where_and_when

from launch.turns import Failed, Measured, in_turns

WORKER = ROOT / "benchmarks" / "muzero_worker.py"
ROWS = {
    "model alone": {"part": "model"},
    "acting": {"part": "act"},
    "learning": {"part": "learn"},
    "whole": {},
    "whole, mctx": {"search": "mctx"},
}
BATCHES, SIMULATIONS, CORES = (16, 64, 256, 1024), (8, 16, 50), (1, 2, 4, 8)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="parts: anakin/gumbel, sebulba, cores")
    parser.add_argument("--rounds", type=int, default=5, help="blocks of each row")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a block")
    parser.add_argument(
        "--out", type=Path, default=Path("muzero-speed.png"), help="picture of the sweep; CSV beside it"
    )
    parser.add_argument("--quick", action="store_true", help="3 blocks of half a second: shows that it runs")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.seconds = 3, 0.5
    return args


def command(args: argparse.Namespace, **options: object) -> list[str]:
    line = [sys.executable, str(WORKER), "--seconds", str(args.seconds)]
    return line + [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def whole_and_parts(architecture: str, agent: str, args: argparse.Namespace, logs: Path) -> list[str]:
    """One table's lines."""
    rows = dict(ROWS)
    if agent == "gumbel-muzero":
        rows["whole, rounds"] = {"search": "rounds"}
    if architecture == "sebulba":
        rows = {name: options for name, options in rows.items() if name.startswith("whole")}
    commands = {
        name: command(args, architecture=architecture, agent=agent, **options) for name, options in rows.items()
    }
    found = in_turns(commands, args.rounds, logs / f"{architecture}_{agent}", freeze=architecture == "sebulba")
    rival = found["whole, mctx"]
    lines = []
    for name, row in found.items():
        if isinstance(row, Failed):
            lines.append(f"| {architecture:7} | {agent:13} | {name:13} | {row.reason} |")
            continue
        times = ("", "")
        if name.startswith("whole") and isinstance(rival, Measured):
            times = f"{row.steps_per_s / rival.steps_per_s:.2f}", f"{rival.cpu_per_million / row.cpu_per_million:.2f}"
        lines.append(
            f"| {architecture:7} | {agent:13} | {name:13} | {row.steps_per_s:9,.0f} | {row.spread:6.0%} | "
            f"{row.cpu_per_million:8.1f} | {times[0]:>6} | {times[1]:>10} | {row.compile_s:9.1f} |"
        )
    return lines


def cores(args: argparse.Namespace, logs: Path) -> list[str]:
    """Gumbel MuZero with 16 simulations, the same 256 environments on more and more virtual cores."""
    commands = {str(count): command(args, cores=count, simulations=16) for count in CORES}
    rows = in_turns(commands, args.rounds, logs / "cores")
    base = rows["2"]
    lines = [
        "| virtual cores |   steps/s | against 2 |  CPU s/M |",
        "|--------------:|----------:|----------:|---------:|",
    ]
    for count, row in rows.items():
        if isinstance(row, Failed) or isinstance(base, Failed):
            lines.append(f"| {count:>13} | {row if isinstance(row, Failed) else base} |")
            continue
        change = row.steps_per_s / base.steps_per_s - 1
        lines.append(f"| {count:>13} | {row.steps_per_s:9,.0f} | {change:9.0%} | {row.cpu_per_million:8.1f} |")
    return lines


def sweep(args: argparse.Namespace, logs: Path) -> list[str]:
    """Throughput of both architectures by environments and simulations; also as CSV and as a picture."""
    rows = []
    for architecture in ("anakin", "sebulba"):
        for simulations in SIMULATIONS:
            commands = {
                str(batch): command(args, architecture=architecture, simulations=simulations, num_envs=batch)
                for batch in BATCHES
            }
            name = f"sweep_{architecture}_{simulations}"
            for batch, row in in_turns(commands, args.rounds, logs / name, freeze=architecture == "sebulba").items():
                if isinstance(row, Measured):
                    rows.append((architecture, simulations, int(batch), row.steps_per_s, row.spread))
    with open(args.out.with_suffix(".csv"), "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("architecture", "simulations", "environments", "steps_per_s", "spread"))
        writer.writerows(rows)
    draw(rows, args.out)
    lines = ["| architecture | simulations | environments |   steps/s | spread |", "|:--|--:|--:|--:|--:|"]
    return lines + [f"| {a} | {s} | {b} | {speed:,.0f} | {spread:.0%} |" for a, s, b, speed, spread in rows]


def draw(rows: list[tuple], out: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4))
    for place, architecture in enumerate(("anakin", "sebulba"), 1):
        axes = figure.add_subplot(1, 2, place)
        for simulations in SIMULATIONS:
            points = [(row[2], row[3]) for row in rows if row[:2] == (architecture, simulations)]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=f"{simulations} simulations")
        axes.set(xscale="log", yscale="log", xlabel="environments", ylabel="steps/s", title=architecture.capitalize())
        axes.set_xticks(BATCHES, [str(batch) for batch in BATCHES])
        axes.minorticks_off()
        axes.legend()
    figure.suptitle("Gumbel MuZero on CartPole, acting and learning, two cores of one processor")
    figure.savefig(out, dpi=150, bbox_inches="tight")


def main() -> None:
    args = parse_args()
    wanted = lambda name: not args.only or any(word in name for word in args.only)
    print(where_and_when(["python", *sys.argv]))
    logs = Path(tempfile.mkdtemp(prefix="muzero_speed_"))
    names = ("on", "agent", "row", "steps/s", "spread", "CPU s/M", "x mctx", "x mctx CPU", "compile s")
    print(f"\n| {' | '.join(names)} |\n|:--|:--|:--|" + "--:|" * 6)
    for architecture in ("anakin", "sebulba"):
        for agent in ("muzero", "gumbel-muzero"):
            if wanted(f"{architecture}/{agent}"):
                print("\n".join(whole_and_parts(architecture, agent, args, logs)), flush=True)
    for part in (cores, sweep):
        if wanted(part.__name__):
            print("\n" + "\n".join(part(args, logs)), flush=True)


if __name__ == "__main__":
    main()
