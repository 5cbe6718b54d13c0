"""Checkpoints: everything a run is, atomically, restorable on another number of cores. Orbax does the files.

A run directory holds `checkpoints/STEPS/` (the newest few, complete states) and `best/STEPS/` (the params that
evaluated best). Params are an item of their own, so that evaluation needs nothing else of the run.
"""

from __future__ import annotations

import contextlib
import logging
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from podracer import hosts
from podracer.errors import UserError

FORMAT = 1


class Checkpoints:
    """The checkpoints in one directory.

    Args:
      directory: created on the first save.
      keep: how many of the newest stay.
      alone: this host reads and writes by itself; else all hosts must do the same together.
    """

    def __init__(self, directory: pathlib.Path, keep: int = 2, alone: bool = False):
        self.directory, self.keep, self._alone = pathlib.Path(directory).absolute(), keep, alone
        self._manager, self._creates = None, False

    def save(self, steps: int, params: Any, state: Any, meta: dict[str, Any]) -> None:
        """Write one checkpoint; it appears under its final name only when it is complete.

        Args:
          steps: decisions so far; names the checkpoint.
          params: what actors receive.
          state: the rest of the run, or () for params alone.
          meta: counters and names, JSON.
        """
        import orbax.checkpoint as ocp

        if self._on_first(lambda: self._prepare(steps)):
            return self._replace(steps, params, state, meta)
        items = {name: _to_dict(tree) for name, tree in {"params": params, "state": state}.items()}
        saved = {name: ocp.args.StandardSave(leaves) for name, leaves in items.items() if leaves}
        meta = {"format": FORMAT, "steps": steps, **meta}
        manager = self._open(create=True)
        for old in manager.all_steps() if hosts.count() == 1 else ():
            if not self._is_complete(old):
                manager.delete(old)  # of a run that was killed there
        manager.save(steps, args=ocp.args.Composite(meta=ocp.args.JsonSave(meta), **saved), force=True)
        manager.wait_until_finished()

    def _prepare(self, steps: int) -> bool:
        """Tidy up after a run that was killed while it saved; whether there is a checkpoint of these steps."""
        self._finish_replacing()
        shutil.rmtree(self._beside, ignore_errors=True)
        if hosts.count() > 1:
            for old in self.directory.glob("[0-9]*"):
                if not _is_complete(old):
                    shutil.rmtree(old)
        return self._is_complete(steps)

    def _on_first(self, function: Callable[[], Any]) -> Any:
        return function() if self._alone else hosts.on_first(function)

    def _replace(self, steps: int, params: Any, state: Any, meta: dict[str, Any]) -> None:
        """Write the checkpoint beside the one of the same name, and swap them: a kill leaves one of them readable."""
        beside = Checkpoints(self._beside, alone=self._alone)
        beside.save(steps, params, state, meta)
        beside.close()

        def swap():
            (self.directory / str(steps)).rename(self._beside / "old")
            self._finish_replacing()
            shutil.rmtree(self._beside)

        self._on_first(swap)
        if self._manager is not None:
            self._manager.reload()

    @property
    def _beside(self) -> pathlib.Path:
        return self.directory / "replacing"

    def _finish_replacing(self) -> None:
        """Fill the place that `_replace` left empty between its two renames. Readers may do so while it goes on."""
        for new in self._beside.glob("*"):
            place = self.directory / new.name
            if new.name.isdigit() and _is_complete(new) and not place.exists():
                with contextlib.suppress(FileNotFoundError):  # someone else was quicker
                    new.rename(place)
                if self._manager is not None:
                    self._manager.reload()

    def steps(self) -> list[int]:
        """The complete checkpoints there are, oldest first."""
        if not self.directory.is_dir():
            return []
        self._finish_replacing()
        return sorted(steps for steps in self._open().all_steps() if self._is_complete(steps))

    def _is_complete(self, steps: int) -> bool:
        return _is_complete(self.directory / str(steps))

    def meta(self, steps: int | None = None) -> dict[str, Any]:
        """The `meta` of one checkpoint (None: the newest).

        Raises:
          UserError: there is none, or it is not one of ours.
        """
        import orbax.checkpoint as ocp

        steps = self._which(steps)
        try:
            meta = self._open().restore(steps, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
            if meta["format"] != FORMAT:
                raise ValueError(f"it has format {meta['format']}, this version reads {FORMAT}")
        except Exception as error:
            raise self._unreadable(steps, error) from error
        return meta

    def params(self, like: Any, steps: int | None = None) -> Any:
        """The params of one checkpoint; `like` has their structure (arrays or shapes)."""
        return self._restore("params", like, steps)

    def state(self, like: Any, steps: int | None = None) -> Any:
        """The rest of the run; the leaves of `like` say on which devices it goes."""
        return self._restore("state", like, steps)

    def close(self) -> None:
        """Wait for nothing to be half written, and let go of the directory."""
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def _restore(self, item: str, like: Any, steps: int | None) -> Any:
        import orbax.checkpoint as ocp

        steps = self._which(steps)
        wanted = {name: _abstract(leaf) for name, leaf in _to_dict(like, data_only=False).items()}
        try:
            _check_same(self._open().item_metadata(steps)[item] or {}, wanted)
            args = ocp.args.Composite(**{item: ocp.args.StandardRestore(wanted)})
            found = self._open().restore(steps, args=args)[item] if wanted else {}
        except Exception as error:
            raise self._unreadable(steps, error) from error
        return _from_dict(found, like)

    def _which(self, steps: int | None) -> int:
        available = self.steps()
        if not available:
            raise UserError(
                f"no complete checkpoint in {self.directory}: the run was stopped before its first. Train anew."
            )
        if steps is not None and steps not in available:
            raise UserError(f"no checkpoint at {steps} steps in {self.directory}; there are {available}.")
        return available[-1] if steps is None else steps

    def _unreadable(self, steps: int, error: Exception) -> UserError:
        reason = (" ".join(str(error).split())[:200] or type(error).__name__).rstrip(".")
        return UserError(
            f"checkpoint {self.directory / str(steps)} cannot be read: {reason}. "
            "Was it made by this agent, network and environment?"
        )

    def _open(self, create: bool = False):
        if self._manager is None or (create and not self._creates):
            self.close()
            import orbax.checkpoint as ocp

            logging.getLogger("absl").setLevel(logging.ERROR)
            handlers = {name: ocp.StandardCheckpointHandler() for name in ("params", "state")}
            handlers |= {"meta": ocp.JsonCheckpointHandler()}
            alone = self._alone and hosts.count() > 1
            if alone and create:  # Orbax does not, for a part of the hosts
                self.directory.mkdir(parents=True, exist_ok=True)
            options = ocp.CheckpointManagerOptions(
                max_to_keep=self.keep,
                create=create and not alone,
                cleanup_tmp_directories=create,
                enable_async_checkpointing=False,
                single_host_load_and_broadcast=False,
                **({"multiprocessing_options": _this_host_only()} if alone else {}),
            )
            self._manager, self._creates = (
                ocp.CheckpointManager(self.directory, options=options, item_handlers=handlers),
                create,
            )
        return self._manager


def _this_host_only() -> Any:
    import orbax.checkpoint as ocp

    mine = hosts.index()
    return ocp.options.MultiprocessingOptions(
        primary_host=mine, active_processes={mine}, barrier_sync_key_prefix=f"host{mine}"
    )


def _is_complete(directory: pathlib.Path) -> bool:
    """Whether all of a checkpoint is there, as far as names tell: a copy or a deletion may have stopped halfway."""
    return (directory / "_CHECKPOINT_METADATA").is_file() and all(
        (directory / item).is_dir() for item in ("meta", "params")
    )


def _to_dict(tree: Any, data_only: bool = True) -> dict[str, Any]:
    """Leaves by the path that leads to them; typed PRNG keys as their data, which any version can store."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    return {name: jax.random.key_data(leaf) if data_only and _is_key(leaf) else leaf for name, leaf in named.items()}


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    if _is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, leaf)
        sharding = getattr(leaf, "sharding", None)
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))


def _from_dict(found: dict[str, Any], like: Any) -> Any:
    def leaf(path, wanted):
        value = found[jax.tree_util.keystr(path, simple=True, separator=".")]
        if _is_key(wanted):
            return jax.random.wrap_key_data(value, impl=jax.random.key_impl(wanted))
        return value

    return jax.tree_util.tree_map_with_path(leaf, like)


def _check_same(there: Any, wanted: dict[str, Any]) -> None:
    """Refuse other names, shapes and dtypes than `wanted`; Orbax would cast, or speak of its own options."""
    for name in sorted({*there, *wanted}):
        if name not in there:
            raise ValueError(f"it has no {name}.")
        if name not in wanted:
            raise ValueError(f"it has {name}, which is not wanted.")
        found, leaf = (f"{each.dtype}{list(each.shape)}" for each in (there[name], wanted[name]))
        if found != leaf:
            raise ValueError(f"{name} is {found}; expected {leaf}.")


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
