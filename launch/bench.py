"""`podracer bench`: figures of speed, each a picture with its numbers beside it."""

from __future__ import annotations

from collections.abc import Callable

from launch import cost, predict, scaling, sweep
from podracer.errors import UserError, closest

FIGURES: dict[str, tuple[Callable[[list[str]], None], str]] = {
    "scaling": (scaling.main, "throughput against the number of cores"),
    "sweep": (sweep.main, "throughput against the batch size, the unroll length or the number of simulations"),
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
