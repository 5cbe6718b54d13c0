"""TPU slices: what a name such as v5litepod-16 means in chips, cores, hosts and machine types.

The number in a name counts TensorCores for v2, v3, v4, v5p and tpu7x, and chips for v5e (`v5litepod`) and v6e. A core
here is a TensorCore: the paper's 8 cores are one v3-8, 4 chips. The figures of the generations are in
`data/generations.csv`, from Google's page of each; what was not found there is None, and whoever needs it is told.
The bandwidth between chips is one direction over all links: v3 by ASTRA-sim's validation (2 axes x 80 GB/s), v4 its
pod's all-reduce bandwidth over its 4096 chips, v5e, v5p and v6e half of Google's bidirectional figure.
"""

from __future__ import annotations

import csv
import functools
import importlib.resources
import re
from typing import Any, NamedTuple

from podracer.errors import UserError, closest

QUEUED = "queued-resource"  # the Cloud TPU API: no longer developed, no tpu7x
COMPUTE = "compute-engine"  # instance groups: v5p and later


class Generation(NamedTuple):
    """One generation of TPUs; figures per chip."""

    name: str
    prefix: str  # of its slices
    cores: int  # TensorCores
    jax_devices: int  # fewer than cores where JAX joins the two of a chip into one ("megacore")
    counts_cores: bool  # what the number in a slice's name counts; otherwise chips
    host_chips: tuple[int, ...]  # chips of one host, by size of slice; the last one is that of slices of many hosts
    axes: int  # of the torus
    max_chips: int
    peak_tflops: float  # bf16
    hbm_gb: float
    ici_gb_per_s: float | None  # out of one chip in one direction, over all its links
    apis: tuple[str, ...]  # the first is the default
    runtime: str | None  # software version of the Cloud TPU API
    machine: str | None  # Compute Engine's and GKE's machine type, up to the number of chips
    image: str | None  # family of Compute Engine's image
    gke: str | None  # value of GKE's node label for slices of several hosts


@functools.cache
def generations() -> dict[str, Generation]:
    """The table of launch/data/generations.csv; an empty field is not known, or does not exist."""
    found = {}
    for row in read_table("generations.csv"):
        facts: dict[str, Any] = {key: value or None for key, value in row.items()}
        facts |= {key: int(row[key]) for key in ("cores", "jax_devices", "axes", "max_chips")}
        facts |= {key: float(row[key]) for key in ("peak_tflops", "hbm_gb")}
        facts["ici_gb_per_s"] = float(row["ici_gb_per_s"]) if row["ici_gb_per_s"] else None
        facts |= {"counts_cores": row["counts_cores"] == "yes", "apis": tuple(row["apis"].split())}
        facts["host_chips"] = tuple(map(int, row["host_chips"].split()))
        found[row["name"]] = Generation(**facts)
    return found


def read_table(name: str) -> list[dict[str, str]]:
    """The rows of a CSV file that comes with the package, in launch/data."""
    with (importlib.resources.files("launch") / "data" / name).open() as file:
        return list(csv.DictReader(file))


class Slice(NamedTuple):
    """A slice: chips that are wired together, and the hosts that they hang on."""

    name: str
    generation: Generation
    chips: int
    hosts: int
    topology: tuple[int, ...]  # chips along each axis of the torus

    @property
    def cores(self) -> int:
        """TensorCores in all."""
        return self.chips * self.generation.cores

    @property
    def chips_per_host(self) -> int:
        return self.chips // self.hosts

    @property
    def cores_per_host(self) -> int:
        return self.cores // self.hosts

    @property
    def jax_devices_per_host(self) -> int:
        """Its cores, as JAX counts them."""
        return self.chips_per_host * self.generation.jax_devices

    @property
    def topology_text(self) -> str:
        """As Google writes it: 4x4."""
        return "x".join(map(str, self.topology))

    @property
    def machine_type(self) -> str | None:
        """Compute Engine's and GKE's name of one host."""
        machine = self.generation.machine
        return None if machine is None else f"{machine}{self.chips_per_host}t"

    def describe(self) -> str:
        """Its size in words."""
        unit = "host" if self.hosts == 1 else "hosts"
        return (
            f"{self.name}: {self.chips} chips, {self.cores} cores, {self.hosts} {unit} of {self.cores_per_host} cores"
        )


def parse(name: str) -> Slice:
    """The slice that a name means.

    Raises:
      UserError: there is no such slice; names some that there are.
    """
    # The short names that people use for those of Google.
    text = re.sub(r"^v5e-", "v5litepod-", re.sub(r"^v7x?-", "tpu7x-", name.strip().lower()))
    match = re.fullmatch(r"([a-z0-9]+)-(\d+)", text)
    found = next((g for g in generations().values() if match and g.prefix == match[1]), None)
    if found is None or match is None or int(match[2]) not in sizes(found):
        raise _unknown(name, found)
    return make(found, int(match[2]) // (found.cores if found.counts_cores else 1))


def make(generation: Generation, chips: int) -> Slice:
    """The slice of so many chips, a power of two."""
    number = chips * (generation.cores if generation.counts_cores else 1)
    # Up to the largest machine a slice is one host; beyond, hosts of the machine that comes last.
    hosts = 1 if chips <= max(generation.host_chips) else chips // generation.host_chips[-1]
    return Slice(f"{generation.prefix}-{number}", generation, chips, hosts, topology(chips, generation.axes))


def sizes(generation: Generation) -> list[int]:
    """The numbers that can stand in a name of this generation: powers of two, in whole hosts."""
    # Between one chip and the four that are wired as a square there is no machine.
    chips = [2**k for k in range(14) if generation.host_chips[0] <= 2**k <= generation.max_chips and k != 1]
    return [size * (generation.cores if generation.counts_cores else 1) for size in chips]


def topology(chips: int, axes: int) -> tuple[int, ...]:
    """Chips along each axis: as equal as powers of two can be, the longest last; 3D slices of one host are 2x2x1."""
    bits = chips.bit_length() - 1
    if axes == 3 and chips <= 4:
        return {1: (1, 1, 1), 4: (2, 2, 1)}[chips]
    base, over = divmod(bits, axes)
    return tuple(2 ** (base + (axis >= axes - over)) for axis in range(axes))


def _unknown(name: str, generation: Generation | None) -> UserError:
    """What is wrong with a name, and what there is near it."""
    if generation is None:
        every = [f"{g.prefix}-{size}" for g in generations().values() for size in sizes(g)]
        prefixes = ", ".join(f"{g.prefix}-N" for g in generations().values())
        near = closest(name, every)
        example = re.search(r"'(.+)'", near)
        hint = f" ({parse(example[1]).describe()})" if example else ""
        return UserError(f"unknown TPU type '{name}'.{near}{hint} Expected {prefixes}.")
    counted = "cores" if generation.counts_cores else "chips"
    number = re.sub(r".*-", "", name)
    near = sorted(sizes(generation), key=lambda size: abs(size - int(number)))[:3] if number.isdigit() else []
    known = [parse(f"{generation.prefix}-{size}") for size in sorted(near or sizes(generation)[:3])]
    text = "; ".join(each.describe() for each in known)
    return UserError(f"unknown TPU type '{name}'; the number counts {counted}. Near it: {text}. Change --type.")
