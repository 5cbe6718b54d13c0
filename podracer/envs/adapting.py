"""What the adapters to other libraries share: missing packages, frozen options, observations, simple pictures."""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.envs import api
from podracer.errors import UserError

# One colour per plane; planes beyond them start over.
PALETTE = np.array(
    [
        (90, 200, 250),
        (255, 196, 60),
        (120, 220, 120),
        (240, 100, 110),
        (190, 130, 250),
        (250, 150, 70),
        (110, 120, 240),
        (230, 230, 230),
        (80, 180, 160),
        (250, 140, 200),
    ],
    np.uint8,
)
BACKGROUND = (24, 26, 32)


def missing(package: str, error: ImportError) -> UserError:
    """The error for an optional package that cannot be imported."""
    return UserError(
        f"this environment needs the package '{package}', which cannot be imported ({error}). "
        "Install it with: pip install '.[envs]' in the source folder."
    )


def freeze(options: dict[str, Any], owner: str) -> tuple[tuple[str, Any], ...]:
    """Keyword arguments as a hashable, ordered tuple: environments are static arguments of compiled functions.

    Raises:
      UserError: a value cannot be hashed, and has no obvious hashable twin.
    """

    def frozen(name, value):
        value = tuple(value) if isinstance(value, list) else value
        try:
            hash(value)
        except TypeError:
            raise UserError(
                f"{owner}: option '{name}' is of type {type(value).__name__}, which cannot be hashed; expected a "
                "number, a string, a tuple or an object with an identity. Build the environment in a file of your "
                "own and name it as path.py:Object instead."
            ) from None
        return name, value

    return tuple(frozen(name, value) for name, value in sorted(options.items()))


def bad_option(owner: str, error: TypeError | ValueError, options: dict[str, Any], known: Iterable[str]) -> UserError:
    """The error for options that a library's constructor refuses."""
    known = sorted(known)
    near = [found for name in options if name not in known for found in difflib.get_close_matches(name, known, 1)]
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return UserError(f"{owner} does not accept the options {sorted(options)}: {error}.{hint} Change or drop them.")


def limit(owner: str, name: str, value: Any) -> int:
    """A time limit that a library takes unseen.

    Raises:
      UserError: it is no whole number above zero.
    """
    if not isinstance(value, numbers.Integral) or value < 1:
        raise UserError(f"{owner}: {name} is {value!r}; expected a whole number >= 1. Change {name}.")
    return int(value)


def compact(observation: Any) -> Any:
    """Leaves as float32, except bool ones, which stay.

    Planes of zeros and ones are a quarter of the size as bool. The trajectory of a whole unroll is stored and read
    back, while the cast to float happens once, fused into the first layer of the network.
    """

    def leaf(value):
        value = jnp.asarray(value)
        return value if value.dtype == bool else value.astype(jnp.float32)

    return jax.tree.map(leaf, observation)


def array_spec(observation: Any) -> Any:
    """The spec of an observation, from its shapes (as `jax.eval_shape` gives them)."""
    return jax.tree.map(lambda leaf: api.Array(tuple(leaf.shape), np.dtype(leaf.dtype)), observation)


def continuous(low: Any, high: Any, shape: tuple[int, ...]) -> api.Continuous:
    """A bounded box, flattened. Bounds near the largest float stand for none."""

    def bounds(values):
        values = np.broadcast_to(np.asarray(values, np.float64), shape).ravel()
        return tuple(float(v) if abs(v) < 1e30 else float(np.copysign(np.inf, v)) for v in values)

    return api.Continuous(bounds(low), bounds(high))


def draw_planes(planes: Any, pixels: int = 240) -> np.ndarray:
    """Planes [height, width, channels] (or one plane [height, width]) as a picture.

    Args:
      planes: what is above zero is drawn, later channels over earlier ones, in one colour per channel.
      pixels: the least height of the picture.

    Returns:
      uint8 [height * k, width * k, 3], numpy, for a whole k.
    """
    planes = np.asarray(planes)
    planes = planes[..., None] if planes.ndim == 2 else planes
    image = np.full((*planes.shape[:2], 3), BACKGROUND, np.uint8)
    for channel in range(planes.shape[2]):
        image[planes[..., channel] > 0] = PALETTE[channel % len(PALETTE)]
    cell = max(1, -(-pixels // planes.shape[0]))
    return image.repeat(cell, 0).repeat(cell, 1)
