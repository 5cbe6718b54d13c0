"""Whole training runs with or without checkpoints, driven over standard input with the protocol of `peers/README.md`.

A block is a run of about `--seconds`; its speed is that between its first row of metrics and its last, by the clock.
"""

import argparse
import importlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from launch import blocks

PROBE_STEPS = 200_000


class Rows:
    """A sink that remembers when rows came."""

    def __init__(self):
        self.seen: list[tuple[int, float, float]] = []  # steps, wall clock, CPU seconds

    def write(self, row: dict[str, Any]) -> None:
        if "steps_per_s" in row:
            self.seen.append((row["steps"], time.perf_counter(), blocks.cpu_seconds()))

    def close(self) -> None:
        pass

    def between(self) -> tuple[int, float, float]:
        """Steps, seconds and CPU seconds from the first row to the last."""
        first, last = self.seen[0], self.seen[-1]
        return last[0] - first[0], last[1] - first[1], last[2] - first[2]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architecture", choices=("anakin", "sebulba"), default="anakin")
    parser.add_argument("--env", default="cartpole")
    parser.add_argument("--agent", default="ppo")
    parser.add_argument("--seconds", type=float, default=95.0, help="length of a run")
    parser.add_argument("--every", type=float, help="seconds between checkpoints; default: no checkpoints")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    say = blocks.take_stdout()
    from podracer import config, envs, mesh

    mesh.start_backend("cpu")
    from launch.compiled import use_compilation_cache

    use_compilation_cache()
    trainer = importlib.import_module(args.architecture)
    env = envs.make(args.env)
    agent = config.make_agent(env.spec, config.agent_maker(args.agent))

    def train(total_steps: int, directory: Path | None) -> Rows:
        rows = Rows()
        changes: dict[str, Any] = {"total_steps": total_steps, "evaluations": 1, "keep": 1000}
        if args.architecture == "sebulba":
            changes["probe"] = False
        if directory is not None:
            changes["checkpoint_every_s"] = args.every
        trainer.train(agent, env, run_dir=directory, sinks=[rows], **changes)
        return rows

    began = time.perf_counter()
    steps, seconds, _ = train(PROBE_STEPS, None).between()
    total_steps = int(steps / seconds * args.seconds)
    say(blocks.ready(vars(args), time.perf_counter() - began))
    for line in sys.stdin:
        if line.strip() == "quit":
            break
        with tempfile.TemporaryDirectory() as folder:
            directory = None if args.every is None else Path(folder) / "run"
            steps, seconds, cpu = train(total_steps, directory).between()
            saved = [] if directory is None else [p for p in (directory / "checkpoints").iterdir() if p.is_dir()]
            say(blocks.answer(steps, seconds, cpu, checkpoints=len(saved)))


if __name__ == "__main__":
    main()
