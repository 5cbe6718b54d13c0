"""Speed of Sebulba against its limits, its layouts and a peer: prints one table, and writes it as CSV and JSON.

    python benchmarks/sebulba_speed.py --csv sebulba.csv --json sebulba.json
    python benchmarks/sebulba_speed.py --parts ceiling,pieces,train --games Pong --networks tiny,nature --batches 16,64
    python benchmarks/sebulba_speed.py --parts peer --peers sample-factory=.venv-sf/bin/python

IMPALA with policy and value on one trunk, on Atari games of envpool; two actor threads, one core that acts and one that
learns:

- ceiling: the environments alone, random actions, from as many threads as the training has
- pieces: the acting program and the update, each alone
- train: the whole, at every batch size (environments per thread) and unroll length
- lag: a workload whose acting and learning take equally long, with and without overlap (lag fixed and sync), on two
  virtual cores and on one that does both
- cartpole: the same program on CartPole-v1 of envpool and of Gymnasium (a process per environment, "async", for small
  batches only)
- peer: Sample Factory's APPO with V-trace on the same game, batch, unroll and network

Every row is a process of its own. All of a workload take turns in blocks of whole updates, and are frozen between them;
the numbers are medians over the blocks. The first updates are not counted. Wall time needs a quiet machine.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from table_head import ROOT, where_and_when

from launch.turns import Failed, Measured, in_turns

WORKER = [sys.executable, str(ROOT / "benchmarks" / "sebulba_worker.py")]
PEERS = {"sample-factory": ROOT / "benchmarks" / "peers" / "sample_factory_impala.py"}
PARTS = ("ceiling", "pieces", "train", "lag", "cartpole", "peer")
THREADS = 2  # actor threads
WIDTHS = (64, 256, 512, 1024, 2048)  # of tiny networks, of which one balances acting and learning
ASYNC_AT_MOST = 32  # environments per thread, as each is a process
# Steps/s on two cores, for the estimate of the duration alone.
GUESSES = {"tiny": 3000.0, "impala_shallow": 1300.0, "nature": 800.0}
START_S = 12.0  # of a process, its compilation included


@dataclasses.dataclass
class Row:
    """One line of the table."""

    part: str
    env: str
    network: str
    batch: int
    unroll: int | None
    row: str
    measured: Measured | Failed
    ceiling: float | None = None  # steps/s
    bound: float | None = None  # steps/s
    pieces_cpu: float | None = None  # CPU seconds per step

    def numbers(self) -> dict[str, Any]:
        """What is written of it."""
        names = {"part": self.part, "env": self.env, "network": self.network, "batch": self.batch}
        names |= {"unroll": self.unroll, "row": self.row}
        if isinstance(self.measured, Failed):
            return {**names, "failed": self.measured.reason}
        found, speeds = self.measured, [block["steps_per_s"] for block in self.measured.blocks]
        frames = found.steps_per_s * (4 if self.env.startswith("atari/") else 1)
        numbers = {"steps_per_s": found.steps_per_s, "steps_per_s_min": min(speeds), "steps_per_s_max": max(speeds)}
        numbers |= {"spread": found.spread, "frames_per_s": frames, "blocks": len(speeds)}
        numbers |= {"of_ceiling": _ratio(found.steps_per_s, self.ceiling)}
        numbers |= {"of_bound": _ratio(found.steps_per_s, self.bound), "cores": found.cores}
        numbers |= {"cpu_us_per_step": found.cpu_per_million}
        numbers |= {"pieces_cpu_us_per_step": None if self.pieces_cpu is None else 1e6 * self.pieces_cpu}
        return {**names, **numbers, **shares(found.blocks)}


def shares(blocks: list[dict]) -> dict[str, float]:
    """What the actor threads and the learner spent their time on, as shares of it."""
    waits = [block["waits"] for block in blocks if "waits" in block]
    if not waits:
        return {}
    groups = {
        "actor": ("environment", "inference", "transfer", "params", "queue_put"),
        "learner": ("queue_get", "learner_step", "publish"),
    }
    found = {}
    for group, names in groups.items():
        sums = {name: sum(wait[name] for wait in waits) for name in names}
        found |= {f"{group}_{name}": sums[name] / sum(sums.values()) for name in names}
    return found


def parse_args() -> argparse.Namespace:
    names = lambda text: [name for name in text.split(",") if name]
    numbers = lambda text: [int(name) for name in names(text)]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", type=names, default=list(PARTS), metavar="PART,...", help=",".join(PARTS))
    parser.add_argument("--games", type=names, default=["Pong", "Breakout"], metavar="GAME,...")
    parser.add_argument("--networks", type=names, default=list(GUESSES), metavar="NAME,...")
    parser.add_argument("--batches", type=numbers, default=[16, 32, 64, 128], metavar="N,...")
    parser.add_argument("--unrolls", type=numbers, default=[20, 60], metavar="N,...")
    parser.add_argument("--rounds", type=int, default=5, help="blocks of each row")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a block; whole updates, at least one")
    parser.add_argument("--cores", type=int, default=2, help="virtual cores, one of which acts")
    parser.add_argument("--batch", type=int, default=32, help="environments per thread in lag and peer")
    parser.add_argument("--unroll", type=int, default=20, help="unroll length in lag, cartpole and peer")
    parser.add_argument("--cartpole-batches", type=numbers, default=[32, 128], metavar="N,...")
    parser.add_argument("--peers", nargs="*", default=[], metavar="NAME=PYTHON", help="peers' own interpreters")
    parser.add_argument("--csv", type=Path, help="file for the table")
    parser.add_argument("--json", type=Path, help="file for the table and every block")
    args = parser.parse_args()
    for part in args.parts:
        if part not in PARTS:
            parser.error(f"--parts has '{part}'; expected some of {', '.join(PARTS)}")
    for peer in args.peers:
        name, _, python = peer.partition("=")
        if name not in PEERS or not Path(python).exists():
            parser.error(f"--peers wants NAME=PYTHON, one of {', '.join(PEERS)} and its interpreter; got '{peer}'")
    return args


def main() -> None:
    args = parse_args()
    cache = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "xla")}
    cache["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    os.environ |= {name: os.environ.get(name, value) for name, value in cache.items()}
    head = where_and_when(["python", *sys.argv])
    print(head)
    print(f"about {math.ceil(duration_s(args) / 60)} minutes on two idle CPU cores\n")
    logs = Path(tempfile.mkdtemp(prefix="sebulba_speed_"))
    print(f"| {'part':8} | {'workload':36} | {'row':24} |  steps/s | spread | frames/s | of ceiling | of bound "
          "| cores | CPU us/step | pieces |")  # fmt: skip
    print(f"|{'-' * 10}|{'-' * 38}|{'-' * 26}|---------:|-------:|---------:|-----------:|---------:|------:"
          "|------------:|-------:|", flush=True)  # fmt: skip
    rows = []
    for row in measure(args, logs):
        rows.append(row)
        print(line(row), flush=True)
        write(args, head, rows)


def measure(args: argparse.Namespace, logs: Path) -> Iterator[Row]:
    """All rows, as they are measured."""
    known: dict[str, dict[str, Measured | Failed]] = {}  # the pieces of a network, which are alike for all games
    if {"ceiling", "pieces", "train"} & set(args.parts):
        for game in args.games:
            for network in args.networks:
                yield from grid(args, f"atari/{game}", network, known, logs / game / network)
    for part, function in (("lag", lag), ("cartpole", cartpole), ("peer", peer)):
        if part in args.parts:
            yield from function(args, logs / part)


def command(env: str, network: str, batches: list[int], unrolls: list[int], seconds: float, **more: Any) -> list[str]:
    """Of a worker of ours."""
    given = {"env": env, "network": network, "batches": batches, "unrolls": unrolls, "seconds": seconds, **more}
    words = list(WORKER)
    for name, value in given.items():
        words += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value])]
    return words


def grid(args: argparse.Namespace, env: str, network: str, known: dict, logs: Path) -> Iterator[Row]:
    """The environments, the pieces and the training of one network on one game, in turns."""
    shapes = [(batch, unroll) for unroll in args.unrolls for batch in args.batches]
    training = shapes if "train" in args.parts else []
    wanted = [f"env/{batch}" for batch in args.batches]
    if network not in known and {"pieces", "train"} & set(args.parts):
        wanted += [f"infer/{batch}" for batch in args.batches] + [f"learn/{b}/{u}" for b, u in shapes]
    shape = {"threads": THREADS, "cores": args.cores}
    commands = {"pieces": command(env, network, args.batches, args.unrolls, args.seconds / 3, what="pieces", **shape)}
    commands["pieces"] += ["--parts", *sorted({what.partition("/")[0] for what in wanted})]
    for b, u in training:
        commands[f"train/{b}/{u}"] = command(env, network, [b], [u], args.seconds, what="train", **shape)
    found = in_turns(commands, args.rounds, logs, {"pieces": wanted}, freeze=True, seldom="learn/")
    pieces = known.setdefault(network, {name: row for name, row in found.items() if name.startswith(("inf", "learn"))})
    for batch in args.batches if "ceiling" in args.parts else ():
        yield Row("ceiling", env, "", batch, None, "environments alone", found[f"env/{batch}"])
    if "pieces" in args.parts:
        for batch in args.batches:
            yield Row("pieces", env, network, batch, None, "acting program alone", pieces[f"infer/{batch}"])
        for b, u in shapes:
            yield Row("pieces", env, network, b, u, "update alone", pieces[f"learn/{b}/{u}"])
    for b, u in training:
        parts = [found[f"env/{b}"], pieces[f"infer/{b}"], pieces[f"learn/{b}/{u}"]]
        yield limited(Row("train", env, network, b, u, "lag fixed", found[f"train/{b}/{u}"]), parts)


def limited(row: Row, parts: list[Measured | Failed]) -> Row:
    """With its limits, from the environments, the acting program and the update, each alone."""
    good = [part for part in parts if isinstance(part, Measured)]
    if len(good) == len(parts):
        row.ceiling = good[0].steps_per_s
        row.bound = 1 / sum(1 / part.steps_per_s for part in good)
        row.pieces_cpu = sum(part.cpu_per_million for part in good) / 1e6
    return row


def lag(args: argparse.Namespace, logs: Path) -> Iterator[Row]:
    """Overlap of acting and learning: one thread of envpool and one of ours, so that acting keeps one core busy."""
    env, b, u = "atari/Pong", args.batch, args.unroll
    shape = {"env_options": json.dumps({"num_threads": 1}), "threads": 1}
    parts = ("env", b), ("infer", b), ("learn", f"{b}/{u}")
    whats = [f"{what}/{at}" for what, at in parts]
    networks = [f"tiny:{width}" for width in WIDTHS]
    measured = {}
    for network in networks:
        words = command(env, network, [b], [u], args.seconds / 3, what="pieces", cores=args.cores, **shape)
        measured[network] = in_turns({"pieces": words}, 3, logs / network, {"pieces": whats}, freeze=True)

    def imbalance(network: str) -> float:
        rows = [measured[network][what] for what in whats]
        if any(isinstance(row, Failed) for row in rows):
            return math.inf
        act, infer, learn = (1 / row.steps_per_s for row in rows)
        return abs(math.log(learn / (act + infer)))

    chosen = min(networks, key=imbalance)
    for what, label in zip(whats, ("environments alone", "acting program alone", "update alone")):
        yield Row("lag", env, chosen, b, u, label, measured[chosen][what])
    commands, labels = {}, {}
    for cores in dict.fromkeys((args.cores, 1)):
        for kind in ("fixed", "sync"):
            name = f"{kind}/{cores}"
            commands[name] = command(env, chosen, [b], [u], args.seconds, cores=cores, lag=kind, **shape)
            labels[name] = f"lag {kind}, {f'1+{cores - 1} cores' if cores > 1 else '1 core for both'}"
    found = in_turns(commands, args.rounds, logs, freeze=True)
    for name, label in labels.items():
        row = Row("lag", env, chosen, b, u, label, found[name])
        yield limited(row, [measured[chosen][what] for what in whats])


def cartpole(args: argparse.Namespace, logs: Path) -> Iterator[Row]:
    """The same program on CartPole-v1 of two libraries."""
    u, shape = args.unroll, {"threads": THREADS, "cores": args.cores}
    for b in args.cartpole_batches:
        commands = {"envpool": command("envpool/CartPole-v1", "mlp", [b], [u], args.seconds, **shape)}
        for kind in ("sync", "async") if b <= ASYNC_AT_MOST else ("sync",):
            more = {**shape, "env_options": json.dumps({"vectorization": kind})}
            commands[f"Gymnasium, {kind}"] = command("gymnasium/CartPole-v1", "mlp", [b], [u], args.seconds, **more)
        found = in_turns(commands, args.rounds, logs / str(b), freeze=True)
        others = [row.steps_per_s for name, row in found.items() if name != "envpool" and isinstance(row, Measured)]
        for name, row in found.items():
            ratio = ""
            if name == "envpool" and isinstance(row, Measured) and others:
                ratio = f" ({row.steps_per_s / max(others):.1f} x the best)"
            yield Row("cartpole", "CartPole-v1", "mlp", b, u, name + ratio, row)


def peer(args: argparse.Namespace, logs: Path) -> Iterator[Row]:
    """Sample Factory on the same work."""
    env, network, b, u = "atari/Pong", "nature", args.batch, args.unroll
    commands = {"podracer": command(env, network, [b], [u], args.seconds, threads=THREADS, cores=args.cores)}
    for given in args.peers:
        name, _, python = given.partition("=")
        shape = ["--env", env, "--network", network, "--batch", b, "--unroll", u, "--threads", THREADS]
        for mode in ("async", "serial"):
            words = [python, PEERS[name], *shape, "--mode", mode, "--seconds", args.seconds, "--torch-threads", 2]
            commands[f"{name}, {mode}"] = list(map(str, words))
    if not args.peers:
        print("peer: skipped. Install benchmarks/peers/requirements-sample-factory.txt in a virtual environment of its "
              "own and pass --peers sample-factory=/path/to/python", file=sys.stderr)  # fmt: skip
        return
    found = in_turns(commands, args.rounds, logs, freeze=True)
    base = found["podracer"]
    for name, row in found.items():
        both = isinstance(row, Measured) and isinstance(base, Measured) and name != "podracer"
        ratio = f" (ours {base.steps_per_s / row.steps_per_s:.2f} x)" if both else ""
        yield Row("peer", env, network, b, u, name + ratio, row)


def duration_s(args: argparse.Namespace) -> float:
    """How long it will take, roughly."""
    total, rounds = 0.0, args.rounds
    for number in range(len(args.games)):
        for network in args.networks if {"ceiling", "pieces", "train"} & set(args.parts) else ():
            rate = GUESSES.get(network, 300.0)
            updates = [THREADS * b * u / rate for b in args.batches for u in args.unrolls]
            total += START_S + len(args.batches) * rounds * args.seconds / 3
            if number == 0 and {"pieces", "train"} & set(args.parts):
                total += sum(START_S / 4 + 2 * s + (rounds + 1) // 2 * max(args.seconds / 3, s) for s in updates)
                total += len(args.batches) * rounds * args.seconds / 3
            if "train" in args.parts:
                total += sum(START_S + 2 * s + rounds * max(args.seconds + s / 2, s) for s in updates)
    turns = rounds * args.seconds
    total += ("lag" in args.parts) * (len(WIDTHS) * (START_S + 3 * args.seconds) + 4 * (START_S + turns))
    total += ("cartpole" in args.parts) * len(args.cartpole_batches) * 3 * (START_S + turns)
    return total + ("peer" in args.parts) * bool(args.peers) * (6 * START_S + 3 * turns)


def line(row: Row) -> str:
    """Of the table."""
    unroll = "" if row.unroll is None else f" x {row.unroll}"
    workload = " ".join(filter(None, (row.env, row.network, f"{row.batch}{unroll}")))
    start = f"| {row.part:8} | {workload:36} | {row.row:24} |"
    if isinstance(row.measured, Failed):
        return f"{start} {row.measured.reason} |"
    found = row.numbers()
    percent = lambda value: "" if value is None else f"{value:.0%}"
    pieces = "" if row.pieces_cpu is None else f"{found['pieces_cpu_us_per_step']:.0f}"
    return (
        f"{start} {found['steps_per_s']:8,.0f} | {found['spread']:6.0%} | {found['frames_per_s']:8,.0f} "
        f"| {percent(found['of_ceiling']):>10} | {percent(found['of_bound']):>8} | {found['cores']:5.2f} "
        f"| {found['cpu_us_per_step']:11.0f} | {pieces:>6} |"
    )


def write(args: argparse.Namespace, head: str, rows: list[Row]) -> None:
    """The files, with the rows so far."""
    numbers = [row.numbers() for row in rows]
    if args.csv:
        names = list(dict.fromkeys(name for row in numbers for name in row))
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(numbers)
    if args.json:
        blocks = [row.measured.blocks if isinstance(row.measured, Measured) else [] for row in rows]
        content = [{**row, "all_blocks": block} for row, block in zip(numbers, blocks)]
        args.json.write_text(json.dumps({"about": head.splitlines(), "rows": content}, indent=1) + "\n")


def _ratio(value: float, to: float | None) -> float | None:
    return None if to is None else value / to


if __name__ == "__main__":
    main()
