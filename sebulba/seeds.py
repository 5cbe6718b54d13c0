"""Seeds of the environments, on every host."""

from __future__ import annotations

import numpy as np

SEEDS_PER_RUN = 2**30  # environment seeds of training are below it, those of evaluations are not


def environment_seeds(seed: int, restarts: int, host: int, num_threads: int, batch_size: int) -> list[list[int]]:
    """Seeds [threads][B], disjoint over hosts, threads and environments, and new after each restart.

    Drawn by numpy's SeedSequence from (seed, restarts, host): neighbouring seeds give unrelated lists, where adding
    the numbers up would give environment 1 of seed 0 the seed of environment 0 of seed 1.
    """
    count = num_threads * batch_size
    rng = np.random.default_rng(np.random.SeedSequence((seed, restarts, host)))
    drawn = _distinct(rng, count)
    assert len(set(drawn.tolist())) == count
    return drawn.reshape(num_threads, batch_size).tolist()


def _distinct(rng: np.random.Generator, count: int) -> np.ndarray:
    """`count` different numbers, without a permutation of all."""
    drawn = np.unique(rng.integers(0, SEEDS_PER_RUN, 2 * count + 100))
    return rng.permutation(drawn)[:count]
