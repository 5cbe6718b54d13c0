"""Speed of MuZero on both architectures: prints tables.

    python benchmarks/muzero_speed.py
    python benchmarks/muzero_speed.py --only anakin/gumbel cores --rounds 5

CartPole, 256 environments in total, 50 simulations, a network of layers of 64, one start of an unroll per decision.
Whole training beside its parts alone (acting, learning, and acting with as many calls of the model and no search: the
limit), and beside the same program with mctx's search. All rows of a table take turns; medians over the blocks. Wall
time needs a quiet machine, CPU seconds less so. `cores`: the same total work on more and more virtual cores. `podracer
bench sweep` draws throughput against batch and simulations, the figures of the Podracer paper's section on MuZero.
"""

from __future__ import annotations

import argparse
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
CORES = (1, 2, 4, 8)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="parts: anakin/gumbel, sebulba, cores")
    parser.add_argument("--rounds", type=int, default=5, help="blocks of each row")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a block")
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
    if wanted("cores"):
        print("\n" + "\n".join(cores(args, logs)), flush=True)


if __name__ == "__main__":
    main()
