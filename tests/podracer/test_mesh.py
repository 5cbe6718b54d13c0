"""Means over cores are what they say, and a platform that is not there is refused."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import learning, mesh
from podracer.errors import UserError

DATA = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
TARGET = np.random.default_rng(1).normal(size=16).astype(np.float32)


def regression(weights, data, target):
    return 0.5 * jnp.mean((data @ weights - target) ** 2), {}


def sgd_step(num_cores, steps=3):
    """Weights after some steps of plain SGD, the batch spread over the cores."""
    rule = learning.optimizer("sgd", None, 0.0)

    def run(data, target, axis):
        learner = learning.Learner(jnp.ones(3), rule.init(jnp.ones(3)))
        for _ in range(steps):
            loss = functools.partial(regression, data=data, target=target)
            learner, metrics = learning.gradient_step(loss, learner, rule, 0.1, axis)
        return learner.weights[None], metrics["gradient_norm"][None]

    if num_cores is None:
        return jax.jit(functools.partial(run, axis=None))(DATA, TARGET)
    function = functools.partial(run, axis=mesh.CORE)
    over = mesh.over_cores(function, mesh.make(num_cores), (mesh.SHARDED, mesh.SHARDED), (mesh.SHARDED, mesh.SHARDED))
    return jax.jit(over)(DATA, TARGET)


@pytest.mark.parametrize("num_cores", [None, 1, 2, 8])
def test_the_gradient_is_the_mean_over_cores_neither_the_sum_nor_each_cores_own(num_cores):
    """Plain SGD against numpy's own descent; every core ends with the same weights."""
    weights = np.ones(3)
    for _ in range(3):
        gradient = DATA.T.astype(np.float64) @ (DATA @ weights - TARGET) / 16
        weights = weights - 0.1 * gradient
    got, norms = sgd_step(num_cores)
    assert got.shape == (num_cores or 1, 3)
    np.testing.assert_allclose(got, np.tile(weights, (num_cores or 1, 1)), rtol=1e-5)
    np.testing.assert_array_equal(got, np.tile(got[:1], (num_cores or 1, 1)))
    np.testing.assert_allclose(norms, np.linalg.norm(gradient), rtol=1e-5)


def test_reductions_over_cores_are_numpys():
    """Sum, mean, minimum, maximum, index, number and masked mean, on eight cores and without an axis."""
    x = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)
    mask = np.random.default_rng(1).random((8, 5)) < 0.4
    mask[2] = False

    def reduce(x, mask, axis):
        return {
            "sum": mesh.total(x, axis),
            "mean": mesh.mean(x, axis),
            "min": mesh.smallest(x, axis),
            "max": mesh.largest(x, axis),
            "masked": mesh.masked_mean(x, mask, axis),
            "cores": jnp.asarray(mesh.num_cores(axis)),
        }, mesh.index(axis)[None]

    function = functools.partial(reduce, axis=mesh.CORE)
    over = mesh.over_cores(function, mesh.make(8), (mesh.SHARDED,) * 2, (mesh.REPLICATED, mesh.SHARDED))
    got, index = jax.jit(over)(x, mask)
    rows = {"sum": x.sum(0), "mean": x.mean(0), "min": x.min(0), "max": x.max(0)}
    for name, wanted in rows.items():
        np.testing.assert_allclose(got[name], wanted[None], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["masked"], x[mask].mean(), rtol=1e-5)
    assert got["cores"] == 8
    np.testing.assert_array_equal(index, np.arange(8))
    alone, index = reduce(jnp.asarray(x), jnp.asarray(mask), None)
    for name in rows:
        np.testing.assert_array_equal(alone[name], x)
    np.testing.assert_allclose(alone["masked"], x[mask].mean(), rtol=1e-5)
    assert alone["cores"] == 1 and index[0] == 0
    assert mesh.masked_mean(jnp.ones(3), jnp.zeros(3, bool), None) == 0


def test_a_mesh_has_as_many_cores_as_asked_for():
    assert mesh.size(mesh.make()) == mesh.size(mesh.make(8)) == 8
    assert mesh.size(mesh.make(3)) == 3
    assert mesh.describe(jax.devices()[:1]) == "1 cpu core"
    assert mesh.describe(jax.devices()) == "8 cpu cores"


@pytest.mark.parametrize("cores", [0, 9, -1])
def test_more_cores_than_there_are_or_none_at_all_are_refused(cores):
    with pytest.raises(UserError, match=f"cores is {cores}.*(expected|started with 8)"):
        mesh.make(cores)


def test_starting_again_says_what_to_do():
    """The tests' JAX has eight cores: as many are fine, more come too late, and no other platform is there."""
    mesh.start_backend("cpu", 8)
    with pytest.raises(UserError, match="already started with 8"):
        mesh.start_backend("cpu", 9)
    with pytest.raises(UserError, match="platform is 'metal'; expected cpu, gpu or tpu"):
        mesh.start_backend("metal")


def python(code, **env):
    """A fresh Python, without this one's settings of JAX."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    return subprocess.run(
        [sys.executable, "-c", code], env={**clean, **env}, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_a_platform_that_is_not_there_is_refused_without_falling_back(platform):
    code = f"""
from podracer import mesh
from podracer.errors import UserError
try:
    mesh.start_backend("{platform}")
except UserError as error:
    print("refused:", error)
else:
    import jax
    print("started:", jax.default_backend())
"""
    done = python(code)
    started = f"started: {platform}" in done.stdout  # on a machine that has one
    assert started or f"refused: platform '{platform}'" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0


def test_the_number_of_virtual_cores_is_chosen_before_jax_starts():
    code = "from podracer import mesh; mesh.start_backend('cpu', 3); import jax; print(jax.device_count())"
    assert python(code).stdout.split() == ["3"]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes cannot be pinned here")
@pytest.mark.parametrize(
    ("cores", "pinned", "given", "expected"),
    [
        (2, False, "", "--xla_cpu_multi_thread_eigen=false"),
        (2, False, "--xla_cpu_multi_thread_eigen=true", "--xla_cpu_multi_thread_eigen=true"),
        (1, True, "--xla_force=x", "--xla_force=x --xla_cpu_multi_thread_eigen=false"),
    ],
)
def test_devices_that_share_a_machine_have_a_thread_each(cores, pinned, given, expected):
    """Those of one process, and those of processes that are pinned to a core each. What the user says stays."""
    pin = "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})" if pinned else ""
    code = f"""
import os
{pin}
from podracer import mesh
mesh.jax.default_backend = lambda: "tpu"  # the flag x is none of XLA's
mesh.start_backend(None, {cores})
print(os.environ["XLA_FLAGS"])
"""
    done = python(code, XLA_FLAGS=given)
    assert done.stdout.strip() == expected, done.stderr


def test_a_platform_asked_for_after_jax_started_on_another_is_refused():
    code = """
import jax; jax.config.update("jax_platforms", "cpu"); jax.devices()
from podracer import mesh
try:
    mesh.start_backend("tpu")
except ValueError as error:
    print("refused:", error)
"""
    done = python(code)
    assert "refused: platform 'tpu'" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("cores", [0, -2])
def test_a_number_of_cores_that_cannot_be_is_refused(cores):
    code = f"""
from podracer import mesh
try:
    mesh.start_backend("cpu", {cores})
except ValueError as error:
    print(type(error).__name__, error)
"""
    assert f"UserError cores is {cores}" in python(code).stdout
