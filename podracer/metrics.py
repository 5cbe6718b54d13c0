"""Numbers about a run: episode returns reduced on the device, and the window over them on the host."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer import mesh
from podracer.types import TimeStep

WINDOW = 100  # episodes


class Episodes(NamedTuple):
    """The episodes that are running, one per environment."""

    returns: jax.Array  # [B] float32, undiscounted rewards so far
    lengths: jax.Array  # [B] int32, steps so far

    @staticmethod
    def start(batch_size: int) -> Episodes:
        return Episodes(jnp.zeros(batch_size, jnp.float32), jnp.zeros(batch_size, jnp.int32))

    def add(self, timestep: TimeStep) -> tuple[Episodes, Ended]:
        """Count one time step [B]. Both reset modes close an episode where the next one starts."""
        returns = self.returns + jnp.where(timestep.valid, timestep.reward, 0.0)
        lengths = self.lengths + timestep.valid
        ended = Ended(timestep.first, returns, lengths, timestep.first & timestep.valid & (timestep.discount > 0))
        return Episodes(jnp.where(timestep.first, 0.0, returns), jnp.where(timestep.first, 0, lengths)), ended


class Ended(NamedTuple):
    """Which episodes were closed by a time step."""

    done: jax.Array  # [..., B] bool
    returns: jax.Array  # [..., B] meaningful where done
    lengths: jax.Array  # [..., B] likewise
    cut: jax.Array  # [..., B] bool, truncated in same-step mode, which loses the value of the final observation


class EpisodeSums(NamedTuple):
    """Sums over the episodes that ended in one update; a few numbers however long the run."""

    count: jax.Array  # [] float32
    returns: jax.Array  # [] sum
    lengths: jax.Array  # [] sum
    smallest: jax.Array  # [] return, +inf without episodes
    largest: jax.Array  # [] return, -inf without episodes
    cut: Any = 0.0  # [] episodes truncated by an environment that says it never does

    @staticmethod
    def of(ended: Ended) -> EpisodeSums:
        """Sums of `ended` [T, B]."""
        done = ended.done
        return EpisodeSums(
            jnp.sum(done, dtype=jnp.float32),
            jnp.sum(jnp.where(done, ended.returns, 0.0)),
            jnp.sum(jnp.where(done, ended.lengths, 0), dtype=jnp.float32),
            jnp.min(jnp.where(done, ended.returns, jnp.inf)),
            jnp.max(jnp.where(done, ended.returns, -jnp.inf)),
            jnp.sum(ended.cut, dtype=jnp.float32),
        )

    def over_cores(self, axis_name: str | None) -> EpisodeSums:
        """These of all cores together, of any shape."""
        count, returns, lengths, cut = mesh.total((self.count, self.returns, self.lengths, self.cut), axis_name)
        negative, largest = mesh.largest((-self.smallest, self.largest), axis_name)
        return EpisodeSums(count, returns, lengths, -negative, largest, cut)


class ReturnWindow:
    """Mean return of the last episodes, on the host: the newest updates that together hold at least 100 of them."""

    def __init__(self, size: int = WINDOW):
        self._size, self._blocks, self.total_episodes = size, collections.deque(), 0

    def add(self, sums: EpisodeSums) -> None:
        """Take the sums of several updates, [U] each, in order."""
        for block in zip(*(np.asarray(leaf, np.float64) for leaf in sums[:5])):
            if block[0] > 0:
                self._blocks.append(block)
                self.total_episodes += int(block[0])
        while self._blocks and sum(block[0] for block in self._blocks) - self._blocks[0][0] >= self._size:
            self._blocks.popleft()

    def row(self) -> dict[str, float]:
        """The window as metrics; empty before the first episode has ended."""
        if not self._blocks:
            return {}
        count, returns, lengths, smallest, largest = (np.asarray(column) for column in zip(*self._blocks))
        return {
            "return_mean": float(returns.sum() / count.sum()),
            "return_min": float(smallest.min()),
            "return_max": float(largest.max()),
            "episode_length_mean": float(lengths.sum() / count.sum()),
            "window_episodes": int(count.sum()),
            "episodes": self.total_episodes,
        }

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, JSON."""
        return {"blocks": [[float(x) for x in block] for block in self._blocks], "episodes": self.total_episodes}

    def restore(self, state: dict[str, Any]) -> None:
        self._blocks = collections.deque(tuple(block) for block in state["blocks"])
        self.total_episodes = state["episodes"]
