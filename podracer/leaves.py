"""The leaves of a tree by name, as files hold them, and whether two trees have the same ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def named(tree: Any) -> dict[str, Any]:
    """Leaves by the path that leads to them; one that is `...` is not read from a checkpoint."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def storable(tree: Any) -> dict[str, Any]:
    """Leaves by name; typed PRNG keys as their data, which any version can store."""
    return {name: jax.random.key_data(leaf) if _is_key(leaf) else leaf for name, leaf in named(tree).items()}


def wanted(tree: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """What `storable` would hold, as shapes on the devices of the leaves."""
    return {name: _abstract(leaf) for name, leaf in named(tree).items() if leaf is not ...}


def unwanted(tree: Any) -> set[str]:
    """The names of the leaves that are not read."""
    return {name for name, leaf in named(tree).items() if leaf is ...}


def put_back(found: dict[str, Any], like: Any) -> Any:
    """The tree `like` with the leaves `found` by name, but for those that were not read."""

    def leaf(path, example):
        if example is ...:
            return example
        value = found[jax.tree_util.keystr(path, simple=True, separator=".")]
        if _is_key(example):
            return jax.random.wrap_key_data(value, impl=jax.random.key_impl(example))
        return value

    return jax.tree_util.tree_map_with_path(leaf, like)


def describe(leaves: dict[str, Any]) -> dict[str, str]:
    """Dtype and shape of each leaf in words: `float32[2, 3]`."""
    return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in leaves.items()}


def difference(there: dict[str, str], expected: dict[str, str]) -> str | None:
    """The first leaf that `there` and `expected` (see `describe`) do not share, in words; None: they are the same."""
    for name in sorted({*there, *expected}):
        if name not in there:
            return f"it has no {name}"
        if name not in expected:
            return f"it has {name}, which is not wanted"
        if there[name] != expected[name]:
            return f"{name} is {there[name]}; expected {expected[name]}"
    return None


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    if _is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
