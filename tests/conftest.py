"""What every test needs before JAX starts: eight virtual CPU cores, a compilation cache, strict broadcasting."""

from __future__ import annotations

import gc
import itertools
import os
import platform
from pathlib import Path

import jax
import pytest

from podracer import mesh, places

# Most of the suite's time is compilation of programs that run for a moment, so they are compiled the quick way: what
# they mean does not depend on it. Tests of learning run long enough to pay for the optimizations that users get.
# XLA's older code generator takes half as long as the one that users get, but computes wrong numbers on processors
# that have AVX2 and not AVX-512 (jax 0.10): it may use neither. With COMPILE_AS_USERS=1 all is compiled as for users.
AS_USERS = os.environ.get("COMPILE_AS_USERS") == "1"
if not AS_USERS and platform.machine() == "x86_64" and jax.__version_info__ < (0, 11):  # XLA refuses unknown flags
    quick = "--xla_cpu_use_fusion_emitters=false --xla_cpu_max_isa=AVX"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {quick}".strip()

places.quiet_libtpu()  # for JAX in subprocesses, too

mesh.start_backend("cpu", 8)
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".cache" / "xla"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


@pytest.fixture(autouse=True)
def quick_compilation(request):
    """Without most optimizations, except where tests train for long or compare bits between programs."""
    if AS_USERS or {"learning", "anakin", "sebulba"} & set(request.path.parts):
        yield
        return
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True)
def strict_broadcasting(request):
    """Arrays of different rank do not broadcast silently, except where a library needs it (`loose_rank`)."""
    third_party = "envs" in request.path.parts or request.path.name == "test_environments.py"
    loose = third_party or request.node.get_closest_marker("loose_rank") is not None
    with jax.numpy_rank_promotion("allow" if loose else "raise"):
        yield


_tests_run = itertools.count()


@pytest.fixture(autouse=True)
def few_memory_maps():
    """Drop compiled programs before there are too many, or they take too much memory.

    Each takes a dozen memory maps, of which Linux allows a process 65,530; at the next one XLA crashes.
    """
    yield
    maps, pages = Path("/proc/self/maps"), Path("/proc/self/statm")
    if next(_tests_run) % 20 or not maps.exists():
        return
    resident = int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if resident > 3e9 or maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()
        gc.collect()
