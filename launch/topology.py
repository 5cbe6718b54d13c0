"""TPU slices that are not here, as the TPU compiler describes them."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

from launch.slices import generations, parse
from podracer import places
from podracer.errors import UserError, closest

EXAMPLES = "v3:32x32 (2,048 cores), v5e:16x16 (256), v6e:2x4 (8)"


class Topology(NamedTuple):
    """A TPU slice that need not be here."""

    name: str
    hosts: list[list[Any]]  # devices of each host
    memory_bytes: int  # per core

    @property
    def devices(self) -> list[Any]:
        return [device for host in self.hosts for device in host]


def full_name(name: str) -> str:
    """GENERATION:SHAPE for the name of a slice such as v5litepod-16; other words as they are.

    Raises:
      UserError: there is no slice of that name.
    """
    if re.fullmatch(r"[a-z0-9]+-\d+", name) is None:
        return name
    piece = parse(name)
    return f"{piece.generation.name}:{piece.topology_text}"


def topology_shape(name: str) -> list[int]:
    """The shape in chips.

    Raises:
      UserError: it is not a generation and a shape.
    """
    generation, _, shape = name.partition(":")
    if generation not in generations():
        near = closest(generation, generations())
        raise UserError(
            f"--topology is '{name}'.{near} Expected one of {', '.join(generations())} and a shape: {EXAMPLES}."
        )
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", shape):
        raise UserError(f"--topology is '{name}'; expected chips along each axis behind {generation}: {EXAMPLES}.")
    return [int(length) for length in shape.split("x")]


def describe(name: str, shape: list[int], slices: int = 1) -> Topology:
    """The devices of a topology.

    Raises:
      UserError: libtpu is not installed, or knows no such slice.
    """
    from jax.experimental import topologies

    places.quiet_libtpu()
    try:
        import libtpu  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError(
            "compile needs the TPU compiler, which is not installed. pip install 'podracer[tpu]'."
        ) from None
    more = {"num_slices": slices} if slices > 1 else {}
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name, **more).devices
    except Exception as error:  # it raises whatever its C++ says
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"--topology {name} x {slices} is unknown to the TPU compiler: {reason}. There is {EXAMPLES}."
        ) from None
    hosts: dict[tuple[int, int], list[Any]] = {}
    for device in devices:
        hosts.setdefault((getattr(device, "slice_index", 0) or 0, device.process_index), []).append(device)
    chips = math.prod(shape) * slices
    memory = int(generations()[name.partition(":")[0]].hbm_gb * 2**30) * chips // len(devices)
    title = f"{name}{f' x {slices} slices' if slices > 1 else ''}"
    return Topology(title, [hosts[key] for key in sorted(hosts)], memory)
