"""Checkpoints: everything a run is, written beside the training, verified when read. Orbax does the files.

A run directory holds `checkpoints/STEPS/` (the newest few, complete states) and `best/STEPS/` (the params that
evaluated best). Params are an item of their own, so that evaluation needs nothing else of the run. A manifest completes
a checkpoint (`podracer.manifest`), which then gets its final name.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from podracer import hosts, leaves, manifest, shelf
from podracer.errors import UserError

ITEMS = ("params", "state")
WRITE_TIMEOUT_S = 600  # until the slowest host has written its part

T = TypeVar("T")


def place(directory: Any) -> Any:
    """A directory or bucket for checkpoints, as an `epath.Path`.

    Raises:
      UserError: it is neither, or what reaches it is not installed.
    """
    from etils import epath

    try:
        path = epath.Path(directory)
    except KeyError as error:
        raise UserError(
            f"checkpoint_dir {directory} begins with {error.args[0]}; expected a directory or a bucket, gs://..."
        ) from None
    if manifest.is_local(path):
        return path.absolute()
    # Whichever is there is what etils takes; without, it says so at the first write, when the run has begun.
    if str(path).startswith("gs://") and not any(importlib.util.find_spec(name) for name in ("gcsfs", "tensorflow")):
        raise UserError(
            f"checkpoint_dir {directory} is a bucket, which gcsfs reaches, and that is not installed. "
            "pip install '.[gcs]' in the source folder."
        )
    return path


class OneHostFailed(RuntimeError):
    """One of several hosts cannot write its part: the others wait for it, for minutes, unless this process ends."""


class Checkpoints:
    """The checkpoints in one directory.

    All hosts of a run call the same methods in the same order, and see the same directory.

    Args:
      directory: created on the first save; a path, or a bucket that Orbax knows (`gs://...`).
      keep: how many of the newest stay.
      run: identifies the run, so that another one's checkpoints are not taken for its own; None: any.
      alone: this host writes and reads by itself, without the others.
    """

    def __init__(self, directory: Any, keep: int = 2, run: str | None = None, alone: bool = False):
        self.directory = place(directory)
        self._shelf, self._alone = shelf.Shelf(self.directory, keep, run), alone
        self._writer: Any = None
        self._writing: tuple[str, dict[str, Any]] | None = None  # name and manifest
        self._chosen: str | None = None

    def save(self, steps: int, params: Any, state: Any, meta: dict[str, Any]) -> None:
        """Begin to write one checkpoint; it appears under its final name when it is complete.

        When this returns, the arrays may be donated: they were copied to the host. The files are written beside what
        follows; errors of that are raised by `poll`, `wait`, `close` and the next `save`.

        Args:
          steps: decisions so far; names the checkpoint.
          params: what actors receive.
          state: the rest of the run, or () for params alone.
          meta: counters and names, JSON.

        Raises:
          OSError: nothing can be written there. With several hosts, all of them raise.
          OneHostFailed: this one of several hosts cannot begin, when the others have.
        """
        import orbax.checkpoint as ocp

        self.wait()
        items = {name: leaves.storable(tree) for name, tree in zip(ITEMS, (params, state)) if jax.tree.leaves(tree)}
        num_bytes = sum(leaf.nbytes for item in items.values() for leaf in item.values())
        name = self._first_says(lambda: self._shelf.new_name(steps, num_bytes))
        self._shelf.take(name)
        self._chosen = None
        described = {item: leaves.describe(found) for item, found in items.items()}
        content = {"format": shelf.FORMAT, "run": self._shelf.run, "steps": steps, "meta": meta, "leaves": described}
        self._writing = name, content
        args = ocp.args.Composite(**{item: ocp.args.StandardSave(found) for item, found in items.items()})
        with self._cleaning():
            try:
                self._open_writer().save(self.directory / name, args=args)
            except Exception as error:
                if self._alone or hosts.count() == 1:
                    raise
                raise OneHostFailed(f"{self.directory / name}: {type(error).__name__}: {error}") from error

    def poll(self) -> None:
        """Raise what went wrong in the background, without waiting; the half-written checkpoint is removed then."""
        if self._writer is not None:
            with self._cleaning():
                self._writer.check_for_errors()

    def wait(self) -> None:
        """Wait until what is being written is complete, and delete all but the newest; raises what went wrong."""
        if self._writer is not None:
            with self._cleaning():
                self._writer.wait_until_finished()
        if self._writing is not None and self._speaks:
            self._shelf.finish(*self._writing)
        self._writing = None

    def close(self) -> None:
        """Wait, and let go of the directory; raises what went wrong."""
        try:
            self.wait()
        finally:
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()

    def check_free(self) -> None:
        """Refuse a directory that another run uses, or that cannot be reached, as a UserError."""
        self._shelf.check_free()

    def names(self) -> list[str]:
        """The folders of checkpoints, whole or not, oldest first."""
        return self._shelf.names()

    def steps(self) -> list[int]:
        """The checkpoints that can be read, oldest first."""
        self.wait()
        found = self._shelf
        return sorted({shelf.parse(n)[0] for n in found.names() if not isinstance(found.verify(n), Exception)})

    def check_none(self) -> None:
        """Refuse a folder with complete checkpoints none of which can be read.

        Raises:
          UserError: it is so; says what is wrong with the newest.
        """
        if self._shelf.complete():
            self._shelf.newest_whole([])

    def choose(self, make: Callable[[dict[str, Any]], tuple[T, dict[str, Any]]]) -> tuple[dict[str, Any], T]:
        """`(meta, made)` of the newest checkpoint that is whole and fits; `meta`, `params` and `state` then mean it.

        Those passed over are named, with what is wrong, in a line each.

        Args:
          make: `meta -> (made, {item: tree})`: whatever is made for such a checkpoint, and the trees to be restored.

        Raises:
          UserError: there is no checkpoint, or none that is whole and fits.
        """
        self.wait()
        passed_over: list[tuple[str, Exception]] = []
        while True:
            name = self._first_says(lambda: self._shelf.newest_whole(passed_over))
            content = self._content(name)
            made, trees = make(_meta(content))
            problem = next(filter(None, (self._misfit(name, item, tree) for item, tree in trees.items())), None)
            if problem is None:
                break
            passed_over.append((name, ValueError(problem)))
        for other, error in passed_over:
            shelf.warn(f"{self._shelf.cannot(other, error)}; going on with {self.directory / name}")
        if content["format"] == 1:
            shelf.warn(f"{self.directory / name} was written without hashes, by an older version: it is not verified")
        self._chosen = name
        return _meta(content), made

    def meta(self, steps: int | None = None) -> dict[str, Any]:
        """The `meta` of one checkpoint (None: the newest that is whole).

        Raises:
          UserError: there is none, or it is not one of ours.
        """
        return _meta(self._content(self._which(steps)))

    def params(self, like: Any, steps: int | None = None) -> Any:
        """The params of one checkpoint; `like` has their structure (arrays or shapes)."""
        return self._restore("params", like, steps)

    def state(self, like: Any, steps: int | None = None) -> Any:
        """The rest of the run; the leaves of `like` say on which devices it goes. Those that are `...` are not read."""
        return self._restore("state", like, steps)

    def _restore(self, item: str, like: Any, steps: int | None) -> Any:
        import orbax.checkpoint as ocp

        name = self._which(steps)
        problem = self._misfit(name, item, like)
        if problem is not None:
            raise self._shelf.unreadable(name, ValueError(problem))
        wanted = leaves.wanted(like)
        try:
            with contextlib.closing(ocp.Checkpointer(self._handler(ocp.PyTreeCheckpointHandler))) as reader:
                how = ocp.checkpoint_utils.construct_restore_args(wanted)
                # In part: `_misfit` has seen that nothing is missing but what is not wanted.
                part = ocp.args.PyTreeRestore(wanted, restore_args=how, partial_restore=True)
                args = ocp.args.Composite(**{item: part})
                found = reader.restore(self.directory / name, args=args)[item] if wanted else {}
        except Exception as error:
            raise self._shelf.unreadable(name, error) from error
        return leaves.put_back(found, like)

    def _which(self, steps: int | None) -> str:
        """The name of the checkpoint that is meant."""
        if steps is None:
            if self._chosen is None:
                self.choose(lambda meta: (None, {}))
            assert self._chosen is not None
            return self._chosen
        self.wait()
        names = [name for name in self._shelf.names() if shelf.parse(name)[0] == steps]
        if not names:
            self._shelf.newest_whole([])  # says so where there is none at all
            raise UserError(f"no checkpoint at {steps} steps in {self.directory}; there are {self.steps()}.")
        return names[-1]

    def _content(self, name: str) -> dict[str, Any]:
        """The manifest of a checkpoint that is whole."""
        found = self._shelf.verify(name)
        if isinstance(found, Exception):
            raise self._shelf.unreadable(name, found) from found
        return found

    def _misfit(self, name: str, item: str, like: Any) -> str | None:
        """The first leaf of an item that is not as in `like`; Orbax would cast, or speak of its own options."""
        content = self._content(name)
        if content["format"] == 1:
            import orbax.checkpoint as ocp

            try:
                tree: Any = ocp.StandardCheckpointHandler().metadata(self.directory / name / item)
            except Exception as error:
                raise self._shelf.unreadable(name, error) from error
            there = leaves.describe(dict(tree))
        else:
            there = content["leaves"].get(item, {})
        read = {leaf: what for leaf, what in there.items() if leaf not in leaves.unwanted(like)}
        return leaves.difference(read, leaves.describe(leaves.wanted(like)))

    @property
    def _speaks(self) -> bool:
        """Whether this host writes the manifest and deletes what is old."""
        return self._alone or hosts.is_first()

    def _first_says(self, ask: Callable[[], str]) -> str:
        """The name of a checkpoint that the first host says, or its refusal, on all hosts."""
        name, error = "0", None
        try:
            name = ask() if self._speaks else name
        except Exception as refusal:  # of a file system, of a bucket's library, or a UserError
            error = refusal
        if not self._alone:
            refused, name = hosts.from_first("name of a checkpoint", [error is not None, name])
            if refused and error is None:
                error = OSError(f"the first host cannot use {self.directory}; its own message says why")
        if error is not None:
            raise error
        return name

    @contextlib.contextmanager
    def _cleaning(self):
        """Give the space back where a write fails."""
        try:
            yield
        except Exception:
            self._writing = None
            if self._speaks:
                self._shelf.clean()
            raise

    def _seal(self) -> None:
        """Complete a checkpoint whose files are all there: called by Orbax, in its thread, before the last rename."""
        assert self._writing is not None
        name, content = self._writing
        manifest.write(self._shelf.under_way(name), content)

    def _options(self) -> tuple[Any, Any]:
        """Orbax's options for several hosts, and for writing in the background."""
        import orbax.checkpoint as ocp

        if self._alone:
            together = ocp.options.MultiprocessingOptions(hosts.index(), {hosts.index()})
        else:
            # Named hosts wait for each other in the coordination service. Where Orbax finds none named, it has all
            # cores add up a number, between the learner's own sums (see `podracer.hosts`).
            together = ocp.options.MultiprocessingOptions(
                active_processes=set(range(hosts.count())), barrier_sync_key_prefix=self.directory.name
            )
        # Directories are made before `save` returns, so that it raises what forbids them.
        beside = ocp.options.AsyncOptions(WRITE_TIMEOUT_S, None, self._seal, create_directories_asynchronously=False)
        return together, beside

    def _handler(self, of_items: Any = None) -> Any:
        import orbax.checkpoint as ocp

        logging.getLogger("absl").setLevel(logging.CRITICAL)  # errors are raised; their traceback is not for users
        together, beside = self._options()
        options = ocp.CompositeOptions(multiprocessing_options=together, async_options=beside)
        items: dict[str, Any] = {
            item: (of_items or ocp.StandardCheckpointHandler)(multiprocessing_options=together) for item in ITEMS
        }
        return ocp.CompositeCheckpointHandler(composite_options=options, **items)

    def _open_writer(self) -> Any:
        if self._writer is None:
            import orbax.checkpoint as ocp

            together, beside = self._options()
            self._writer = ocp.AsyncCheckpointer(
                self._handler(),
                async_options=beside,
                multiprocessing_options=together,
                # What it would add comes after the manifest, and is not needed.
                checkpoint_metadata_store=ocp.metadata.metadata_store(enable_write=False),
            )
        return self._writer


def _meta(content: dict[str, Any]) -> dict[str, Any]:
    return {**content["meta"], "format": content["format"], "steps": content["steps"]}
