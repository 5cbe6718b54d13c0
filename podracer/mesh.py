"""Cores, meshes and means over them: the only file that names shard_map, Mesh and pmean.

Why one file: under `jax.shard_map`'s default `check_vma=True`, `pmean` of gradients taken with respect to replicated
parameters is n times too large, because the transposed broadcast has already summed them; under `check_vma=False`
forgetting the mean silently gives each core its own gradient. Here it is always `check_vma=False` plus an explicit
mean, and the tests compare 1 core with n cores under plain SGD, which hides neither error (Adam hides the first).
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podracer import hosts, places
from podracer.errors import UserError, check_number

CORE = "core"
# They stand for whole parts of records, whatever those hold: a `LearnerState` of them says how to lay one out.
SHARDED: Any = PartitionSpec(CORE)
REPLICATED: Any = PartitionSpec()
SHARDED_SECOND: Any = PartitionSpec(None, CORE)  # along the second axis: trajectories [T, B, ...]


_made_for: contextvars.ContextVar[str | None] = contextvars.ContextVar("made_for", default=None)


def platform() -> str:
    """The platform that programs are made for: the one JAX runs on, except inside `made_for`."""
    return _made_for.get() or jax.default_backend()


@contextlib.contextmanager
def made_for(name: str) -> Iterator[None]:
    """Programs traced inside take the forms that suit this platform, "cpu", "gpu" or "tpu", though JAX runs on another.

    JAX keeps what it has traced: clear its caches where the same functions were traced for another platform before.
    """
    token = _made_for.set(name)
    try:
        yield
    finally:
        _made_for.reset(token)


def physical_cores() -> int:
    """CPU cores that this process may use, counting the hyper-threads of a core once."""
    return len(cpus())


def cpus() -> list[int]:
    """One logical CPU of each physical core that this process may use, by the numbers of the operating system."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    first: dict[str, int] = {}
    for cpu in sorted(usable):
        try:
            with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as file:
                first.setdefault(file.read().strip(), cpu)
        except OSError:
            return sorted(usable)
    return list(first.values())


def start_backend(platform: str | None = None, cores: int | None = None) -> None:
    """Choose the platform and, on a CPU, the number of virtual cores. Call it once, before JAX is used.

    On a CPU every virtual core is a device with one thread of its own. With the devices doing the parallel work,
    XLA's intra-op threads only get in each other's way, so they are switched off where there is more than one core,
    and in a process that is pinned to a single one: hosts on one machine, say, compute as the cores of one host do.

    Args:
      platform: "cpu", "gpu" or "tpu"; None takes what JAX finds.
      cores: virtual CPU cores; None takes one per physical core. Ignored on other platforms.

    Raises:
      UserError: the platform is not there (there is no silent fall-back to the CPU), or JAX has already started
        with another number of CPU devices, or `cores` is less than 1.
    """
    if platform not in (None, "cpu", "gpu", "tpu"):
        raise UserError(f"platform is '{platform}'; expected cpu, gpu or tpu. Leave it out to take what is there.")
    if platform is not None:
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(platform, platform))
    elif not places.has_tpu():  # JAX tries it all the same, where `podracer compile` has it installed
        places.quiet_libtpu()
    check_number("cores", cores, minimum=1)
    wanted = cores or physical_cores()
    if hosts.count() > 1 and "xla_cpu_collective_call_terminate" not in os.environ.get("XLA_FLAGS", ""):
        # By default XLA aborts the process where one host makes the others wait for a minute, as it evaluates or saves.
        waits = "--xla_cpu_collective_call_warn_stuck_timeout_seconds=600 "
        waits += "--xla_cpu_collective_call_terminate_timeout_seconds=3600"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {waits}".strip()
    if (wanted > 1 or physical_cores() == 1) and "xla_cpu_multi_thread_eigen" not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()
    # JAX refuses this once its backend has started; the check at the end then says what to do.
    with contextlib.suppress(RuntimeError):
        # JAX adds its flags to the config as it runs.
        there = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
        if cores is not None or there < 1:  # a number set by the user's program stays
            jax.config.update("jax_num_cpu_devices", wanted)
    try:
        backend = jax.default_backend()
    except (RuntimeError, AssertionError) as error:  # JAX asserts where a platform's plugin is not installed
        reason = (str(error) or "JAX has no such plugin").splitlines()[0]
        raise UserError(
            f"platform '{platform}' is not available here ({reason}). "
            "Choose another --platform, or install its extra: pip install '.[tpu]' or '.[cuda]' in the source folder."
        ) from error
    if platform is not None and backend != platform:
        raise UserError(f"platform '{platform}' was asked for but JAX started on '{backend}'. Check the drivers.")
    if backend == "cpu" and cores is not None and jax.local_device_count() < cores:
        raise UserError(
            f"cores is {cores} but JAX has already started with {jax.local_device_count()} CPU devices; "
            "call podracer.mesh.start_backend(cores=...) before anything else uses JAX."
        )
    if backend == "cpu" and hosts.count() > 1:
        _never_interrupt_each_other()


def _never_interrupt_each_other() -> None:
    """Let the threads of this process, and those that they start, run until they wait, and not when others wake up.

    Gloo, over which CPUs of several hosts meet, has a thread of its own for what comes in. Where it wakes up on the CPU
    of the thread that computes, while that one holds Gloo's lock, it asks for the lock again and again until the end of
    its time slice: 4 ms for a sum that takes 0.3 (decision 20). Linux's policy for batch work has no such wake-ups.
    """
    if not hasattr(os, "SCHED_BATCH"):  # Linux only
        return
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended; or a sandbox does not allow it
            if os.sched_getscheduler(int(thread)) == os.SCHED_OTHER:
                os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))


def make(num_cores: int | None = None) -> Mesh:
    """A one-axis mesh over `num_cores` devices of every host (None: all of them). Starts JAX where nothing has yet.

    The cores of a host are neighbours, in the order of the hosts: core c of host h is number h * num_cores + c.

    Raises:
      UserError: there are fewer devices, or not as many on each host.
    """
    start_backend(cores=num_cores)
    per_host = by_host(jax.devices())
    fewest = min(map(len, per_host))
    if num_cores is None and fewest < max(map(len, per_host)):
        counts = ", ".join(str(len(devices)) for devices in per_host)
        raise UserError(f"the hosts have {counts} cores; expected as many on each. Choose --cores {fewest}.")
    num_cores = fewest if num_cores is None else num_cores
    if not 1 <= num_cores <= fewest:
        raise UserError(
            f"cores is {num_cores}; expected 1 to {fewest}, the {jax.default_backend()} devices there are. "
            "On a CPU, --cores (or podracer.mesh.start_backend) makes more virtual ones."
        )
    return Mesh([device for devices in per_host for device in devices[:num_cores]], (CORE,))


def by_host(devices: Sequence[Any]) -> list[list[Any]]:
    """The devices of each host, in the order of the hosts."""
    found: dict[int, list[Any]] = {}
    for device in sorted(devices, key=lambda device: device.process_index):
        found.setdefault(device.process_index, []).append(device)
    return list(found.values())


def local(mesh: Mesh) -> list[Any]:
    """This host's devices of the mesh, in its order."""
    return [device for device in mesh.devices.flat if device.process_index == jax.process_index()]


def replicate(mesh: Mesh, value: Any) -> Any:
    """A pytree of numbers, the same on every host, as arrays replicated over the mesh; no host asks another.

    `jax.device_put` would have all hosts compare their values each time.
    """
    sharding = NamedSharding(mesh, PartitionSpec())

    def one(leaf):
        whole = np.asarray(leaf)
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    return jax.tree.map(one, value)


def over(devices: Sequence[Any]) -> Mesh:
    """A one-axis mesh over these devices."""
    return Mesh(list(devices), (CORE,))


def from_shards(mesh: Mesh, shards: Sequence[Any], axis: int) -> Any:
    """Arrays over the mesh from one pytree per core, whose leaves lie on that core already; nothing is copied.

    Args:
      mesh: the cores, this host's in the order of `shards`; the other hosts bring theirs.
      shards: pytrees of single-device arrays, equal in shape.
      axis: along which the shards are joined, 0 or 1.
    """
    sharding = NamedSharding(mesh, PartitionSpec(*[None] * axis, CORE))

    def one(*leaves):
        shape = list(leaves[0].shape)
        shape[axis] *= size(mesh)
        return jax.make_array_from_single_device_arrays(tuple(shape), sharding, list(leaves))

    return jax.tree.map(one, *shards)


def idle_cores(mesh: Mesh) -> int:
    """Physical CPU cores that `mesh` leaves idle because JAX was started with fewer devices; 0 elsewhere."""
    chosen = "JAX_NUM_CPU_DEVICES" in os.environ or len(local(mesh)) < jax.local_device_count()
    if jax.default_backend() != "cpu" or chosen:
        return 0
    return max(physical_cores() - jax.local_device_count(), 0)


IDLE = (
    "JAX was already running with fewer devices than this machine has cores. To use all of them, call "
    "podracer.mesh.start_backend() before anything else."
)


def size(mesh: Mesh) -> int:
    """The number of cores in `mesh`."""
    return mesh.devices.size


def over_cores(function: Callable, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """`function` replicated over the mesh; each core sees its own shard of what is `SHARDED`."""
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def compiled_quickly(function: Callable, **options: Any) -> Callable:
    """`jax.jit(function, **options)` for a program that runs once: quick to compile, not to run."""
    quick = {"xla_backend_optimization_level": 0} if platform() == "cpu" else None
    return jax.jit(function, compiler_options=quick, **options)


def shardings(mesh: Mesh, specs: Any) -> Any:
    """`specs` (a pytree of PartitionSpec) as shardings of `mesh`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def mean(tree: Any, axis_name: str | None) -> Any:
    """Mean over the cores of `axis_name`; the identity where it is None."""
    return tree if axis_name is None else _as_one(jax.lax.pmean, tree, axis_name)


def total(tree: Any, axis_name: str | None) -> Any:
    """Sum over the cores of `axis_name`; the identity where it is None."""
    return tree if axis_name is None else _as_one(jax.lax.psum, tree, axis_name)


def smallest(tree: Any, axis_name: str | None) -> Any:
    """Minimum over the cores of `axis_name`; the identity where it is None."""
    return tree if axis_name is None else _as_one(jax.lax.pmin, tree, axis_name)


def largest(tree: Any, axis_name: str | None) -> Any:
    """Maximum over the cores of `axis_name`; the identity where it is None."""
    return tree if axis_name is None else _as_one(jax.lax.pmax, tree, axis_name)


def _as_one(reduce: Callable, tree: Any, axis_name: str) -> Any:
    """`reduce(tree, axis_name)`, on CPUs with all leaves of a dtype in one vector.

    There, the cores meet once per array and not once per collective, and a small network has a dozen arrays.
    """
    leaves, structure = jax.tree.flatten(tree)
    if platform() != "cpu" or len(leaves) < 2:
        return reduce(tree, axis_name)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    reduced = {}
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        places = [place for place, leaf in enumerate(leaves) if leaf.dtype == dtype]
        vector = reduce(jnp.concatenate([leaves[place].ravel() for place in places]), axis_name)
        ends = np.cumsum([leaves[place].size for place in places])
        parts = jnp.split(vector, ends[:-1].tolist())
        reduced |= {place: part.reshape(leaves[place].shape) for place, part in zip(places, parts, strict=True)}
    return jax.tree.unflatten(structure, [reduced[place] for place in range(len(leaves))])


def index(axis_name: str | None) -> Any:
    """Which core this is, [] int32."""
    return jnp.zeros((), jnp.int32) if axis_name is None else jax.lax.axis_index(axis_name)


def num_cores(axis_name: str | None) -> int:
    """How many cores `axis_name` spans, a Python int."""
    return 1 if axis_name is None else jax.lax.axis_size(axis_name)


def masked_mean(values: Any, mask: Any, axis_name: str | None) -> Any:
    """Mean of `values` where `mask` (same shape), over all cores: the sum of both parts, then their ratio."""
    weight = mask.astype(values.dtype)
    sums = total((jnp.sum(values * weight), jnp.sum(weight)), axis_name)
    return sums[0] / jnp.maximum(sums[1], 1)


def describe(devices: Sequence[Any]) -> str:
    """The devices in words: '2 cpu cores', '8 TPU v5 lite cores'."""
    kind = devices[0].device_kind
    return f"{len(devices)} {kind} core{'s' if len(devices) != 1 else ''}"
