"""Speed of Anakin against its limits and its peers: prints one table.

    python benchmarks/anakin_speed.py
    python benchmarks/anakin_speed.py --quick --only cartpole
    python benchmarks/anakin_speed.py --peers rejax=.venv-rejax/bin/python brax=.venv-brax/bin/python

On CartPole-v1, MinAtar Breakout and Catch, with 64 and 1024 environments in total: the environment alone with random
actions (the limit), acting only (the same loop without learning), and the whole training of A2C, PPO and V-trace. The
network is always the same: actor and critic apart, two layers of 64. PPO makes 4 epochs of 4 minibatches (8 on
Breakout). Peers run PPO in the same shape. All rows of a workload take turns in blocks of a few seconds; the numbers
are medians over the blocks. Wall time needs a quiet machine, CPU seconds per million steps less so.

At the end: what 8 virtual cores cost against one per physical core at constant total work, and the time from the start
of the process to the end of the first learning update.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from table_head import ROOT, where_and_when

from launch.turns import Failed, Measured, Worker, in_turns

WORKER = ROOT / "benchmarks" / "anakin_worker.py"
PEERS = ROOT / "benchmarks" / "peers"
UNROLL = {64: 128, 1024: 32}
MINIBATCHES = {"cartpole": 4, "breakout": 8, "catch": 4}
OWN = ("env", "act", "a2c", "impala", "ppo")
LABELS = {"env": "environment alone", "act": "acting only", "a2c": "A2C", "impala": "V-trace", "ppo": "PPO"}


class Workload(NamedTuple):
    env: str
    num_envs: int

    def arguments(self, seconds: float) -> list[str]:
        shape = {"env": self.env, "num-envs": self.num_envs, "unroll": UNROLL[self.num_envs], "epochs": 4}
        shape |= {"minibatches": MINIBATCHES[self.env], "seconds": seconds}
        return [part for name, value in shape.items() for part in (f"--{name}", str(value))]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", nargs="*", default=[], metavar="NAME=PYTHON", help="peers' own interpreters")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="parts: cartpole, catch/64, cores, start")
    parser.add_argument("--rounds", type=int, default=7, help="blocks of each row")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a block")
    parser.add_argument("--quick", action="store_true", help="5 blocks of half a second: shows that it runs")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.seconds = 5, 0.5
    for peer in args.peers:
        name, _, python = peer.partition("=")
        if not (PEERS / f"{name}_ppo.py").exists() or not Path(python).exists():
            parser.error(f"--peers wants NAME=PYTHON, a peer in benchmarks/peers and its interpreter; got '{peer}'")
    return args


def main() -> None:
    args = parse_args()
    print(where_and_when(["python", *sys.argv]))
    known = sorted(path.name.removesuffix("_ppo.py") for path in PEERS.glob("*_ppo.py"))
    peers = dict(peer.split("=", 1) for peer in args.peers)
    for name in known:
        if name not in peers:
            print(f"{name}: skipped. Install benchmarks/peers/requirements-{name}.txt in a virtual environment of its "
                  f"own and pass --peers {name}=/path/to/python")  # fmt: skip
    logs = Path(tempfile.mkdtemp(prefix="anakin_speed_"))
    print(f"\n| {'workload':16} | {'row':18} |   steps/s | spread | of limit | x rejax | x brax | cores | CPU s/M |")
    print(f"|{'-' * 18}|{'-' * 20}|----------:|-------:|---------:|--------:|-------:|------:|--------:|", flush=True)
    for workload in (Workload(env, num_envs) for env in MINIBATCHES for num_envs in UNROLL):
        name = f"{workload.env}/{workload.num_envs}"
        if wanted(name, args.only):
            for line in table(name, measure(workload, peers, args, logs)):
                print(line, flush=True)
    if wanted("cores", args.only):
        print("\n" + many_cores(args, logs), flush=True)
    if wanted("start", args.only):
        print("\n" + start(args, logs), flush=True)


def wanted(name: str, only: list[str]) -> bool:
    return not only or any(word in name for word in only)


def measure(workload: Workload, peers: dict[str, str], args, logs: Path) -> dict[str, Measured | Failed]:
    """All rows of a workload, taking turns."""
    shape = workload.arguments(args.seconds)
    commands = {what: [sys.executable, str(WORKER), "--what", what, *shape] for what in OWN}
    for peer, python in peers.items():
        commands[peer] = [python, str(PEERS / f"{peer}_ppo.py"), *shape]
    return in_turns(commands, args.rounds, logs / f"{workload.env}_{workload.num_envs}")


def table(workload: str, rows: dict[str, Measured | Failed]) -> list[str]:
    """Lines of the table."""

    def ratio(row: Measured, name: str) -> str:
        other = rows.get(name)
        return f"{row.steps_per_s / other.steps_per_s:.2f}" if isinstance(other, Measured) else ""

    lines = []
    for name, row in rows.items():
        label = LABELS.get(name, f"PPO of {name}")
        if isinstance(row, Failed):
            lines.append(f"| {workload:16} | {label:18} | {row.reason} |")
            continue
        limit = f"{row.steps_per_s / rows['env'].steps_per_s:.0%}" if isinstance(rows["env"], Measured) else ""
        against = [ratio(row, peer) if name == "ppo" else "" for peer in ("rejax", "brax")]
        lines.append(
            f"| {workload:16} | {label:18} | {row.steps_per_s:9,.0f} | {row.spread:6.0%} | {limit:>8} "
            f"| {against[0]:>7} | {against[1]:>6} | {row.cores:5.2f} | {row.cpu_per_million:7.2f} |"
        )
    return lines


def many_cores(args, logs: Path) -> str:
    """PPO on CartPole with the same 1024 environments on more and more virtual cores."""
    shape = Workload("cartpole", 1024).arguments(args.seconds)
    counts = (1, 2, 4, 8)
    commands = {
        f"{cores} cores": [sys.executable, str(WORKER), "--what", "ppo", "--cores", str(cores), *shape]
        for cores in counts
    }
    rows = in_turns(commands, args.rounds, logs)
    base = rows["2 cores"]
    lines = ["PPO on CartPole, 1024 environments in total, on virtual cores of this machine:", ""]
    lines += ["| virtual cores | steps/s | against 2 | CPU s/M |", "|--------------:|--------:|----------:|--------:|"]
    for cores in counts:
        row = rows[f"{cores} cores"]
        if isinstance(row, Failed) or isinstance(base, Failed):
            lines.append(f"| {cores:13} | {row if isinstance(row, Failed) else base} |")
            continue
        change = row.steps_per_s / base.steps_per_s - 1
        lines.append(f"| {cores:13} | {row.steps_per_s:7,.0f} | {change:9.0%} | {row.cpu_per_million:7.2f} |")
    return "\n".join(lines)


def start(args, logs: Path) -> str:
    """Seconds from the start of the process to the end of the first update."""
    lines = ["Start of the process to the end of the first update, 64 environments, nothing cached:", ""]
    lines += ["| agent, environment | seconds (median of 3) | of which after imports |", "|:--|--:|--:|"]
    for what, env in (("a2c", "catch"), ("ppo", "catch"), ("ppo", "cartpole"), ("ppo", "breakout")):
        command = [sys.executable, str(WORKER), "--what", what, *Workload(env, 64).arguments(0)]
        results = [Worker(f"start {what} {env} {i}", command, logs).result() for i in range(1 if args.quick else 3)]
        good = sorted((row.ready_s, row.compile_s) for row in results if isinstance(row, Measured))
        if good:
            seconds, compile_s = good[len(good) // 2]
            lines.append(f"| {LABELS[what]}, {env} | {seconds:.1f} | {compile_s:.1f} |")
        else:
            lines.append(f"| {LABELS[what]}, {env} | {results[0]} |  |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
