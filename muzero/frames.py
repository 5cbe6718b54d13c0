"""Observations as they lie in memory: of stacked frames each plane once.

A stack of S planes repeats S - 1 planes of the time step before, except where an episode starts. What happens there is
the environment's business, and it is read off the data: envpool fills the stack with the first frame of a new game and
goes on with the old planes after a lost life; others begin with blank planes.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer.errors import UserError
from podracer.specs import Array as ArraySpec
from podracer.types import Array

GOES_ON, FILLED, BLANK, LOST = range(4)


class Planes(NamedTuple):
    """A sequence of T stacks of S planes."""

    planes: Array  # [S - 1 + T, H, W] the older planes of the first stack, then the newest of each
    start: Array  # [T] uint8, how the older planes of each stack came about


@dataclasses.dataclass(frozen=True)
class Packing:
    """How observations of a spec are stored.

    Args:
      spec: the observation's.
      stack: S, planes per stack, newest last; 1: observations are stored as they are.

    Raises:
      UserError: no leaf is a stack of that many planes.
    """

    spec: Any
    stack: int = 1

    def __post_init__(self):
        if self.stack > 1 and not any(self._axis(leaf) is not None for leaf in jax.tree.leaves(self.spec)):
            shapes = [leaf.shape for leaf in jax.tree.leaves(self.spec)]
            raise UserError(
                f"frame_stack is {self.stack}, but observations have the shapes {shapes}; expected bytes of 3 axes, "
                f"{self.stack} planes first or last. Set frame_stack to 1, or to the environment's stack."
            )

    def _axis(self, leaf: ArraySpec) -> int | None:
        """Along which axis a leaf is stacked, or None where it is not."""
        if self.stack == 1 or len(leaf.shape) != 3 or leaf.dtype != np.uint8:
            return None
        return {leaf.shape[2]: 2, leaf.shape[0]: 0}.get(self.stack)  # first, where both could be

    def pack(self, observation: Any) -> Any:
        """A sequence [T, ...] as it is stored: stacks become `Planes`."""

        def one(spec, leaf):
            axis = self._axis(spec)
            return leaf if axis is None else _pack(jnp.moveaxis(leaf, axis + 1, 1))

        return jax.tree.map(one, self.spec, observation)

    def unpack(self, packed: Any, rows: Array, positions: Array) -> Any:
        """Observations [P, B, ...] at `positions` [P, B] of the sequences `rows` [B] among stored ones [C, ...]."""

        def one(spec, leaf):
            axis = self._axis(spec)
            if axis is None:
                return leaf[jnp.broadcast_to(rows[None], positions.shape), positions]
            return jnp.moveaxis(_unpack(leaf, rows, positions, self.stack), 2, axis + 2)

        return jax.tree.map(one, self.spec, packed)

    def lost(self, packed: Any) -> Array:
        """The share of time steps [] whose older planes cannot be rebuilt: the environment stacks in another way."""
        stacks = [leaf.start for leaf in jax.tree.leaves(packed, is_leaf=_is_planes) if _is_planes(leaf)]
        shares = [jnp.mean((start == LOST).astype(jnp.float32)) for start in stacks]
        return jnp.mean(jnp.stack(shares)) if shares else jnp.zeros(())


def _is_planes(leaf: Any) -> bool:
    return isinstance(leaf, Planes)


def _pack(stacks: Array) -> Planes:
    """[T, S, H, W] -> `Planes`."""
    older, newest = stacks[:, :-1], stacks[:, -1:]

    def same(one, other):
        return jnp.all(one == other, (1, 2, 3))

    goes_on = jnp.concatenate([jnp.ones(1, bool), same(older[1:], stacks[:-1, 1:])])
    filled, blank = same(older, jnp.broadcast_to(newest, older.shape)), same(older, jnp.zeros_like(older))
    start = jnp.where(goes_on, GOES_ON, jnp.where(filled, FILLED, jnp.where(blank, BLANK, LOST)))
    return Planes(jnp.concatenate([older[0], newest[:, 0]]), start.astype(jnp.uint8))


def _unpack(stored: Planes, rows: Array, positions: Array, stack: int) -> Array:
    """Stacks [P, B, S, H, W]."""
    start = stored.start[rows].T  # [T, B]
    times = jax.lax.broadcasted_iota(jnp.int32, start.shape, 0)
    latest = jax.lax.cummax(jnp.where(start == GOES_ON, -stack, times), axis=0)  # the last start at or before each time
    begin = jnp.take_along_axis(latest, positions, 0)
    kind = jnp.take_along_axis(start, jnp.maximum(begin, 0), 0)
    back = jnp.arange(stack - 1, -1, -1)
    wanted = positions[..., None] - back.reshape(1, 1, -1)
    source = jnp.maximum(wanted, begin[..., None]) + stack - 1
    planes = stored.planes[jnp.broadcast_to(rows.reshape(1, -1, 1), source.shape), source]
    blank = (wanted < begin[..., None]) & (kind[..., None] == BLANK)
    return jnp.where(blank[..., None, None], 0, planes).astype(planes.dtype)
