"""One host of several that save or read a checkpoint together: `PROCESS COUNT PORT save|read DIRECTORY`.

Run by `test_several_hosts.py`; how many cores a host has is in JAX_NUM_CPU_DEVICES.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np


def tree(cores):
    """Everything that states have: replicated, spread, one per core, keys."""
    spread, same = mesh.shardings(cores, mesh.SHARDED), mesh.shardings(cores, mesh.REPLICATED)
    put = lambda array, to: jax.make_array_from_callback(array.shape, to, lambda index: array[index])
    params = {"w": put(np.arange(12, dtype=np.float32).reshape(3, 4), same), "b": put(np.float32(7), same)}
    keys = jax.jit(lambda: jax.random.split(jax.random.key(5), 8), out_shardings=spread)()
    key = jax.jit(lambda: jax.random.key(3), out_shardings=same)()
    state = {"env": put(np.arange(16, dtype=np.float32).reshape(8, 2), spread), "keys": keys, "key": key}
    return params, state


def check(found, expected):
    """Each host compares the parts it has, bit for bit."""
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        data = jax.random.key_data if jnp.issubdtype(one.dtype, jax.dtypes.prng_key) else (lambda leaf: leaf)
        for mine, wanted in zip(data(one).addressable_shards, data(other).addressable_shards, strict=True):
            assert mine.index == wanted.index
            np.testing.assert_array_equal(mine.data, wanted.data)


def main(process, count, port, what, directory):
    if count > 1:
        address = f"127.0.0.1:{port}"
        jax.distributed.initialize(address, count, process, coordinator_bind_address=address)
    cores = mesh.make()
    params, state = tree(cores)
    checkpoints = Checkpoints(f"{directory}/checkpoints", run="mine")
    if what == "save":
        step = jax.jit(lambda leaf: leaf * 0, donate_argnums=0)
        for steps in (10, 20, 20, 30):
            checkpoints.save(steps, params, state, {"hosts": count})
            gone = step(state["env"])  # donated while the files are written
            params, state = tree(cores)
        del gone
        alone = Checkpoints(f"{directory}/best-{process}", 1, alone=True)  # the other host is not asked
        if process == 0:
            alone.save(1, {"w": np.arange(3.0)}, (), {})
            alone.close()
        checkpoints.close()
        broken = Checkpoints("/proc/nowhere")
        try:
            broken.save(1, params, state, {})
        except OSError:
            print("refused")
    else:
        meta, _ = checkpoints.choose(lambda meta: (None, {"params": params, "state": state}))
        assert (meta["steps"], meta["hosts"]) == (30, 2), meta
        check(checkpoints.params(params), params)
        check(checkpoints.state(state), state)
        best = Checkpoints(f"{directory}/best-0", 1, alone=True)
        np.testing.assert_array_equal(best.params({"w": np.zeros(3)})["w"], np.arange(3.0))
    print(f"done {jax.device_count()} {jax.process_count()}", flush=True)


if __name__ == "__main__":
    from podracer import mesh
    from podracer.checkpoint import Checkpoints

    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
