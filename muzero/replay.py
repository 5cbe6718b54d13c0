"""Replay on the device: a ring of sequences, one environment's L decisions each, in `LearnerState.memory`.

Sequences never touch: nothing is assumed of what lies beside one, so that the write head, dropped trajectories and
trajectories in any order do no harm. Everything is allocated once; bytes stay bytes.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from muzero.frames import Packing
from muzero.sampling import blank, blank_action
from muzero.sequences import Sequence
from muzero.targets import terminal
from podracer import mesh
from podracer.errors import UserError
from podracer.specs import Spec
from podracer.types import Array, TimeStep


class Memory(NamedTuple):
    """One core's ring."""

    sequences: Sequence  # [C, ...]
    priority: Any  # [C, S] float32, of each start to the power alpha; 0: nothing to learn there. Sampled alike: ()
    head: Array  # [] int32, where the next sequence goes
    count: Array  # [] int32, sequences in it


class Sample(NamedTuple):
    """Starts of unrolls."""

    row: Array  # [B] int32, which sequence
    start: Array  # [B] int32, the position in it
    probability: Array  # [B] with which this core's memory gave it, times the number of starts in it


@dataclasses.dataclass(frozen=True)
class Replay:
    """The sizes of a memory and what can be done with it.

    Args:
      spec: the environment's.
      num_actions: A, or the number of sampled ones.
      capacity: C, sequences per core.
      length: L, decisions per sequence.
      unroll_steps: K; starts are the first S = L - K + 1 positions.
      frame_stack: planes per stack of frames, stored once; 1: as they are.
      prioritised: sample by priority.
      sampled: policies come with the actions that they are about (`sampling.Sampled`).
    """

    spec: Spec
    num_actions: int
    capacity: int
    length: int
    unroll_steps: int
    frame_stack: int = 1
    prioritised: bool = False
    sampled: bool = False

    @property
    def packing(self) -> Packing:
        return Packing(self.spec.observation, self.frame_stack)

    @property
    def num_starts(self) -> int:
        return self.length - self.unroll_steps + 1

    def initial(self) -> Memory:
        """An empty memory."""
        times = self.length + 1
        observation = jax.tree.map(lambda leaf: jnp.zeros((times, *leaf.shape), leaf.dtype), self.spec.observation)
        numbers, flags = jnp.zeros(times, jnp.float32), jnp.zeros(times, bool)
        policy = blank(self.spec.action, self.num_actions) if self.sampled else jnp.zeros(self.num_actions)
        decision = blank_action(self.spec.action), policy
        action, policy = jax.tree.map(lambda leaf: jnp.zeros((self.length, *leaf.shape), leaf.dtype), decision)
        sequence = Sequence(
            jax.eval_shape(self.packing.pack, observation),
            TimeStep((), numbers, numbers, flags, flags),
            action,
            policy,
            jnp.zeros(self.length, jnp.float32),
        )
        rows = jax.tree.map(lambda leaf: jnp.zeros((self.capacity, *leaf.shape), leaf.dtype), sequence)
        priority = jnp.zeros((self.capacity, self.num_starts), jnp.float32) if self.prioritised else ()
        return Memory(rows, priority, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))

    def num_bytes(self) -> int:
        """What one core's memory takes."""
        leaves = jax.tree.leaves(jax.eval_shape(self.initial))
        return sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in leaves)

    def insert(self, memory: Memory, sequences: Sequence) -> Memory:
        """Write sequences [N, ...] over the oldest ones. New ones get the largest priority there is.

        Raises:
          UserError: one trajectory does not fit.
        """
        number = sequences.value.shape[0]
        if number > self.capacity:
            raise UserError(
                f"one trajectory is {number * self.length:,} decisions per core, but replay_steps is "
                f"{self.capacity * self.length:,}; expected at least as many. Raise replay_steps."
            )
        rows = (memory.head + jnp.arange(number)) % self.capacity
        stored = jax.tree.map(
            lambda leaf, new: leaf.at[rows].set(new, unique_indices=True), memory.sequences, sequences
        )
        priority = memory.priority
        if self.prioritised:
            largest = jnp.max(priority)
            new = self._alive(sequences) * jnp.where(largest > 0, largest, 1.0)
            priority = priority.at[rows].set(new, unique_indices=True)
        head, count = (memory.head + number) % self.capacity, jnp.minimum(memory.count + number, self.capacity)
        return Memory(stored, priority, head.astype(jnp.int32), count.astype(jnp.int32))

    def _alive(self, sequences: Sequence) -> Array:
        """[N, S] float32, 1 where a start holds something to learn: its decision was taken, or it is terminal."""
        timestep = sequences.timestep
        alive = timestep.valid[:, 1:] | terminal(timestep)[:, :-1]
        return alive[:, : self.num_starts].astype(jnp.float32)

    def sample(self, memory: Memory, key: Array, size: int) -> Sample:
        """`size` starts, with replacement."""
        if not self.prioritised:
            number = jax.random.randint(key, (size,), 0, jnp.maximum(memory.count, 1) * self.num_starts)
            return Sample(number // self.num_starts, number % self.num_starts, jnp.ones(size))
        draws = jax.random.uniform(key, (2, size))
        # First the sequence, then the start in it: one sum over all of the memory, and none in order.
        by_row = jnp.sum(memory.priority, 1)
        row = _invert(jnp.broadcast_to(by_row[None], (1, self.capacity)), draws[:1])[0]
        start = _invert(memory.priority[row], draws[1][:, None])[:, 0]
        share = memory.priority[row, start] / jnp.maximum(jnp.sum(by_row), 1e-30)
        return Sample(row, start, share * (memory.count * self.num_starts).astype(jnp.float32))

    def reprioritise(self, memory: Memory, sample: Sample, error: Array, alpha: Array | float) -> Memory:
        """Set the priorities of `sample` from the errors [B] of its values."""
        if not self.prioritised:
            return memory
        new = (jnp.abs(error) + 1e-3) ** alpha
        old = memory.priority[sample.row, sample.start]
        new = jnp.where((old > 0) & jnp.isfinite(new), new, old)
        return memory._replace(priority=memory.priority.at[sample.row, sample.start].set(new))


def _invert(weights: Array, draws: Array) -> Array:
    """Per row the first position whose cumulative weight passes draw x total: [R, N], [R, D] in [0, 1) -> [R, D].

    Where there are any weights, only positions that have one are found.
    """
    # XLA adds up as a tree, rounded differently at each position: its sums may also fall, and rise where there is no
    # weight. Such a position would be drawn once in a while, and with probability 0 outweigh all others.
    cumulative = jax.lax.cummax(jnp.where(weights > 0, jnp.cumsum(weights, 1), 0.0), 1)
    found = jax.vmap(lambda sums, draw: jnp.searchsorted(sums, draw, side="right"))
    return jnp.minimum(found(cumulative, draws * cumulative[:, -1:]), weights.shape[1] - 1).astype(jnp.int32)


def importance(sample: Sample, beta: Array | float, axis_name: str | None) -> Array:
    """Weights [B] that undo the sampling by priority, at most 1 over all cores (Schaul et al. 2016, section 3.4).

    What has probability 0 (a memory without priorities gives nothing else) weighs nothing.
    """
    weight = jnp.where(sample.probability > 0, jnp.maximum(sample.probability, 1e-12) ** -beta, 0.0)
    return weight / jnp.maximum(mesh.largest(jnp.max(weight), axis_name), 1e-30)
