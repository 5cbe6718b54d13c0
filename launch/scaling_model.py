"""How a measured core would scale over a TPU slice: one update of N cores takes that of one, plus one all-reduce.

    t(N) = t(1) + r * (2 (n-1)/n * P/W + alpha * (n_1 + ... + n_k)),    throughput(N) = N * steps per update / t(N)

n chips along k axes n_1 ... n_k of a torus, P bytes of gradients, W bytes/s out of a chip in one direction over the
axes that the slice has, alpha seconds per hop, r all-reduces per update. Weak scaling: the batch of a core stays.
"""

from __future__ import annotations

from typing import NamedTuple

from launch.slices import Generation, sizes, topology

HOP_S = 1e-6
WORST_HOP_S, WORST_BANDWIDTH = 5e-6, 0.5  # the pessimistic edge of the band
ASSUMPTIONS = (
    "every core is as fast as the measured one, at the same batch per core (weak scaling)",
    "the all-reduce is not hidden behind other work, and the only thing that cores wait for",
    "the cores of a chip add their gradients up for free; links carry their full bandwidth",
    "hosts keep up: environments on the host (Sebulba) need as many CPUs per core as where it was measured",
)


class Measured(NamedTuple):
    """What the model starts from."""

    steps_per_s: float  # of one core
    update_s: float  # t(1)
    params_bytes: int  # P
    reduces_per_update: int = 1  # r


class Point(NamedTuple):
    """What the model says of so many cores; [as modelled, at worst, without any communication]."""

    cores: int
    chips: int
    topology: tuple[int, ...]
    reduce_s: float  # of one update
    steps_per_s: tuple[float, float, float]
    efficiency: tuple[float, float, float]


def all_reduce_s(size: int, chips: tuple[int, ...], bytes_per_s: float, hop_s: float = HOP_S) -> float:
    """One all-reduce of `size` bytes by rings along the axes of a torus.

    Args:
      size: bytes.
      chips: along each axis.
      bytes_per_s: out of one chip, one direction, over all axes that have more than one chip.
      hop_s: latency of a hop.
    """
    number = 1
    for length in chips:
        number *= length
    if number == 1:
        return 0.0
    return 2 * (number - 1) / number * size / bytes_per_s + hop_s * sum(length for length in chips if length > 1)


def predict(generation: Generation, largest_cores: int, measured: Measured, bytes_per_s: float) -> list[Point]:
    """One core, and every slice of the generation up to so many cores."""
    unit = 1 if generation.counts_cores else generation.cores
    numbers = sorted({1, *(size * unit for size in sizes(generation))})
    return [point(generation, cores, measured, bytes_per_s) for cores in numbers if cores <= largest_cores]


def point(generation: Generation, cores: int, measured: Measured, bytes_per_s: float) -> Point:
    """What the model says of so many cores."""
    chips = max(cores // generation.cores, 1)
    shape = (1,) * generation.axes if chips == 1 else topology(chips, generation.axes)
    # A slice that is flat along an axis has no links there.
    bandwidth = bytes_per_s * sum(length > 1 for length in shape) / generation.axes

    def reduce_s(part: float, hop_s: float) -> float:
        if chips == 1:
            return 0.0
        once = all_reduce_s(measured.params_bytes, shape, bandwidth * part, hop_s)
        return measured.reduces_per_update * once

    modelled, worst = reduce_s(1.0, HOP_S), reduce_s(WORST_BANDWIDTH, WORST_HOP_S)
    efficiency = tuple(measured.update_s / (measured.update_s + each) for each in (modelled, worst, 0.0))
    rates = tuple(cores * measured.steps_per_s * each for each in efficiency)
    return Point(cores, chips, shape, modelled, rates, efficiency)  # type: ignore[arg-type]
