"""What every test needs before JAX starts: eight virtual CPU cores, a compilation cache, strict broadcasting."""

from __future__ import annotations

import gc
import itertools
import os
from pathlib import Path

import jax
import pytest

from podracer import mesh

# Most of the suite's time is compilation of programs that run for a moment, so they are compiled the quick way: what
# they mean does not depend on it. Tests of learning run long enough to pay for the optimizations that users get.
if jax.__version_info__ < (0, 11):  # XLA refuses to start with a flag that it does not know
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false".strip()

mesh.start_backend("cpu", 8)
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".cache" / "xla"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


@pytest.fixture(autouse=True)
def quick_compilation(request):
    """Without most optimizations, except where a test trains for long."""
    if "learning" in request.path.parts or request.node.get_closest_marker("optimized") is not None:
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
    """Drop compiled programs before there are too many.

    Each takes a dozen memory maps, of which Linux allows a process 65,530; at the next one XLA crashes.
    """
    yield
    maps = Path("/proc/self/maps")
    if next(_tests_run) % 20 == 0 and maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()
        gc.collect()
