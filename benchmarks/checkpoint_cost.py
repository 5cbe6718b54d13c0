"""What staying alive costs: asynchronous checkpoints by the clock, and the start of two hosts.

    python benchmarks/checkpoint_cost.py
    python benchmarks/checkpoint_cost.py --only start --rounds 3

checkpoints: `anakin.train` and `sebulba.train` for a while, with a checkpoint every 30 seconds and without a run
directory, in turns; steps per second of wall time from the first row of metrics to the last, whatever is in between.
start: seconds from the start of `podracer train` to its end, for a run of a few updates, by one process with 2 cores
and by `podracer launch local` with two hosts of one core, which call the roll and connect.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from table_head import ROOT, where_and_when

from launch.turns import Failed, in_turns

WORKLOADS = {
    "anakin, ppo, cartpole": {"architecture": "anakin", "env": "cartpole", "agent": "ppo"},
    "anakin, ppo, minatar/Breakout": {"architecture": "anakin", "env": "minatar/Breakout", "agent": "ppo"},
    "sebulba, impala, cartpole": {"architecture": "sebulba", "env": "cartpole", "agent": "impala"},
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("checkpoints", "start"), help="one of the two tables")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each row")
    parser.add_argument("--seconds", type=float, default=95.0, help="length of a run: three checkpoints of 30 s")
    parser.add_argument("--every", type=float, default=30.0, help="seconds between checkpoints")
    return parser.parse_args()


def checkpoints(args: argparse.Namespace, logs: Path) -> None:
    """One table."""
    print("\n| workload | checkpoints | steps/s | spread | cost | checkpoints per run |\n|:--|:--|--:|--:|--:|--:|")
    worker = [sys.executable, str(ROOT / "benchmarks" / "checkpoint_worker.py"), "--seconds", str(args.seconds)]
    for name, names in WORKLOADS.items():
        words = [word for option, value in names.items() for word in (f"--{option}", value)]
        rows = {"none": [*worker, *words], f"every {args.every:g} s": [*worker, *words, "--every", str(args.every)]}
        found = in_turns(rows, args.rounds, logs / name.replace("/", "_"))
        without = found["none"]
        for label, row in found.items():
            if isinstance(row, Failed) or isinstance(without, Failed):
                print(f"| {name} | {label} | {row.reason if isinstance(row, Failed) else ''} |")
                continue
            pairs = zip(row.blocks, without.blocks)
            cost = statistics.median(1 - mine["steps_per_s"] / its["steps_per_s"] for mine, its in pairs)
            saved = statistics.median(block["checkpoints"] for block in row.blocks)
            print(
                f"| {name} | {label} | {row.steps_per_s:,.0f} | {row.spread:.0%} | {cost:.1%} | {saved:g} |", flush=True
            )


def start(args: argparse.Namespace, folder: Path) -> None:
    """The other one."""
    podracer = [sys.executable, "-m", "launch.cli"]
    train = ["train", "anakin", "--env", "catch", "--agent", "a2c", "--total-steps", "4096", "--evaluations", "1"]
    two = ["--hosts", "2", "--cores-per-host", "1"]
    commands = {
        "train, 2 cores": [*podracer, *train, "--cores", "2"],
        "launch local, 2 hosts of 1 core": [*podracer, "launch", "local", *two, "--", *train],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(args.rounds + 1):
        for name, command in commands.items():
            run = folder / f"{name.partition(',')[0].replace(' ', '-')}-{number}"
            began = time.perf_counter()
            done = subprocess.run([*command, "--run", str(run)], capture_output=True, text=True)
            if done.returncode:
                print(f"{name}: status {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
                return
            if number:  # the first one fills the compilation cache
                times[name].append(time.perf_counter() - began)
    print("\n| command | seconds | added |\n|:--|--:|--:|")
    alone = next(iter(times.values()))
    for name, seconds in times.items():
        added = statistics.median(mine - its for mine, its in zip(seconds, alone, strict=True))
        print(f"| {name} | {statistics.median(seconds):.1f} | {added:.1f} |")


def main() -> None:
    args = parse_args()
    print(where_and_when(["python", *sys.argv]))
    folder = Path(tempfile.mkdtemp(prefix="checkpoint_cost_"))
    if args.only != "start":
        checkpoints(args, folder)
    if args.only != "checkpoints":
        start(args, folder)


if __name__ == "__main__":
    main()
