"""What runs survive: kills, signals, damaged checkpoints, full disks, missing hosts, mistakes. Each for real.

    python benchmarks/survival.py [--parts a,d] [--times N] [--seed S] [--out FILE]

  a  kill -9 at random moments, a third of them while a checkpoint is being written: Anakin on 1, 2, 4 and 8 cores
  b  one of two hosts killed, or raising, at random moments, without a launcher that would end the other
  c  SIGTERM to both hosts of a run or to one: between calls, at the start, in an evaluation
  d  checkpoints cut short, altered, missing parts, of another run, of another dtype
  e  a full disk: a small tmpfs in a name space of its own
  f  one of two hosts does not start
  g  bad command lines
  h  faults of the actors, the learner and the environment of Sebulba on two hosts

Prints one table: of n tries, how many went as they must, and the upper end of the 95 % confidence interval of the rate
of failures (3/n where there was none).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

TIMES = {"a": 100, "b": 30, "c": 50, "d": 200, "e": 3, "f": 3, "g": 100, "h": 18}


@dataclasses.dataclass
class Result:
    """What came of one part."""

    part: str
    what: str
    good: int
    tried: int
    notes: str = ""
    failures: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    def add(self, problem: str) -> None:
        """One more try; an empty string: it went as it must."""
        self.tried += 1
        self.good += not problem
        if problem:
            self.failures.append(problem)
        print(f"{self.part}: {self.good}/{self.tried} {problem}", file=sys.stderr, flush=True)

    @property
    def bound(self) -> float:
        """Upper end of the 95 % interval of the rate of failures: exact (Clopper and Pearson), by bisection."""
        failed, low, high = self.tried - self.good, 0.0, 1.0
        if not self.tried or failed == self.tried:
            return 1.0
        level = 0.05 if not failed else 0.025
        for _ in range(60):
            rate = (low + high) / 2
            terms = (math.comb(self.tried, i) * rate**i * (1 - rate) ** (self.tried - i) for i in range(failed + 1))
            low, high = (rate, high) if sum(terms) > level else (low, rate)
        return high


def table(results: list[Result]) -> Iterator[str]:
    """The lines of the table, in Markdown."""
    yield "| part | what | as it must | 95 % bound of failures | seconds | notes |"
    yield "|---|---|--:|--:|--:|---|"
    for each in results:
        numbers = f"{each.good}/{each.tried} | {each.bound:.1%} | {each.seconds:.0f}"
        yield f"| {each.part} | {each.what} | {numbers} | {each.notes} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(TIMES), help="which, e.g. a,d")
    parser.add_argument("--times", type=int, help="tries of each part; by default as many as in the published table")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and bytes that are drawn")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    arguments = parser.parse_args()
    parts = [part.strip() for part in arguments.parts.split(",")]
    if not set(parts) <= set(TIMES):
        parser.error(f"--parts is {arguments.parts}; expected some of {','.join(TIMES)}")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended, too

    import survival_hosts
    import survival_one

    runs: dict[str, Callable[[int, int, pathlib.Path], list[Result]]] = survival_one.PARTS | survival_hosts.PARTS
    results: list[Result] = []
    for part in parts:
        with tempfile.TemporaryDirectory(prefix=f"survival-{part}-") as folder:
            began = time.monotonic()
            found = runs[part](arguments.times or TIMES[part], arguments.seed, pathlib.Path(folder))
            for each in found:
                each.seconds = each.seconds or time.monotonic() - began
            results += found
        for each in found:
            print(f"{each.part}: {each.good}/{each.tried} {each.what} {each.notes}", file=sys.stderr, flush=True)
            for line in each.failures[:10]:
                print(f"   failed: {line}", file=sys.stderr, flush=True)
    print("\n".join(table(results)))
    if arguments.out:
        facts = {"python": platform.python_version(), "machine": platform.machine(), "seed": arguments.seed}
        rows = [{**dataclasses.asdict(each), "bound": each.bound} for each in results]
        arguments.out.write_text(json.dumps({**facts, "results": rows}, indent=1) + "\n")
    sys.exit(any(each.good < each.tried for each in results))


if __name__ == "__main__":
    sys.modules["survival"] = sys.modules["__main__"]
    main()
