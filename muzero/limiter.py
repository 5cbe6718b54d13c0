"""How many gradient steps follow a trajectory: by the decisions it brought, not by the speed of the machine."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from podracer.types import Array


class Limiter(NamedTuple):
    """Credit that is left, the same on every core."""

    credit: Array  # [] float32 gradient steps, less than 1 between two trajectories
    rounding: Array  # [] float32, what additions to `credit` have lost (Kahan 1965): millions of them stay exact


def initial() -> Limiter:
    """No credit."""
    return Limiter(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))


def earn(limiter: Limiter, amount: Array | float) -> tuple[Limiter, Array]:
    """Add `amount` gradient steps of credit, and spend all whole ones: `(limiter, how many [] int32)`."""
    wanted = amount - limiter.rounding
    total = limiter.credit + wanted
    rounding = (total - limiter.credit) - wanted
    number = jnp.floor(total)
    return Limiter(total - number, rounding), number.astype(jnp.int32)
