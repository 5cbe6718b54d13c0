"""Which host this process is, of how many, and where they meet: given, set by a launcher, or found out by JAX."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from podracer.errors import UserError, check_number

# What a launcher sets for each process that it starts.
COORDINATOR, COUNT, INDEX = "PODRACER_COORDINATOR", "PODRACER_HOSTS", "PODRACER_HOST"
# Where one of these is set there may be several hosts; elsewhere JAX would ask a metadata server that is not there.
SEVERAL = ("SLURM_STEP_NODELIST", "MEGASCALE_COORDINATOR_ADDRESS", "OMPI_MCA_orte_hnp_uri")


class Place(NamedTuple):
    """Where the hosts meet, and which of them this is."""

    address: str  # HOST:PORT of the first host
    count: int
    index: int


def find(coordinator: str | None, hosts: int | None, host: int | None) -> Place | None:
    """The place of this process by what was given, by the environment, or as JAX finds out; None for a single host.

    Raises:
      UserError: only a part is given, or it cannot be, or JAX cannot find out the rest.
    """
    if hosts == 1:
        return None
    given: dict[str, Any] = {"coordinator": coordinator, "hosts": hosts, "host": host}
    if all(value is None for value in given.values()):
        for name, variable in zip(given, (COORDINATOR, COUNT, INDEX)):
            given[name] = os.environ.get(variable)
        if all(value is None for value in given.values()):
            return _detected()
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise UserError(
            f"--{missing[0]} is missing; expected --coordinator HOST:PORT, --hosts N and --host I (from 0) together."
        )
    for name in ("hosts", "host"):
        try:
            given[name] = int(given[name])
        except ValueError:
            raise UserError(f"{name} is '{given[name]}'; expected a number. Change --{name}.") from None
    check_number("hosts", given["hosts"], minimum=1)
    check_number("host", given["host"], minimum=0, maximum=given["hosts"] - 1)
    split(given["coordinator"])
    return None if given["hosts"] == 1 else Place(given["coordinator"], given["hosts"], given["host"])


def split(address: str) -> tuple[str, int]:
    """`HOST:PORT` as its parts; an IPv6 address stands in brackets.

    Raises:
      UserError: it is not of this form.
    """
    name, _, port = address.rpartition(":")
    if not name or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"coordinator is '{address}'; expected HOST:PORT, for example 10.0.0.2:8476.")
    return name.strip("[]"), int(port)


def _detected() -> Place | None:
    """What JAX finds out."""
    several = any(os.environ.get(name) for name in SEVERAL) or "," in os.environ.get("TPU_WORKER_HOSTNAMES", "")
    if not several and not _on_cloud_tpu():
        return None
    from jax._src.clusters import ClusterEnv

    try:
        address, hosts, host, _ = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, 60)
    except Exception as error:
        raise UserError(
            f"which hosts this run has could not be found out: {type(error).__name__}: {error}. "
            "Give --coordinator, --hosts and --host, or --hosts 1."
        ) from error
    if address is None or hosts is None or host is None or hosts == 1:
        return None
    return Place(address, hosts, host)


def quiet_libtpu() -> None:
    """Tell libtpu, once it is loaded, of a machine: else it looks for the one it is on, and says at length that it
    finds none. To be called where there is no TPU, or where none is wanted."""
    machine = {"SKIP_MDS_QUERY": "1", "WORKER_HOSTNAMES": "localhost", "ACCELERATOR_TYPE": "v5litepod-4"}
    for key, value in machine.items():
        os.environ.setdefault(f"TPU_{key}", value)


def has_tpu() -> bool:
    """Whether this machine has the device files of a TPU (or others of their names)."""
    return os.path.isdir("/dev/vfio") or os.path.exists("/dev/accel0")


def _on_cloud_tpu() -> bool:
    if not has_tpu() or "cpu" in os.environ.get("JAX_PLATFORMS", "") or "TPU_SKIP_MDS_QUERY" in os.environ:
        return False
    from jax._src.cloud_tpu_init import running_in_cloud_tpu_vm

    return running_in_cloud_tpu_vm
