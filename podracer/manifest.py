"""The manifest of a checkpoint: what is in it, and a SHA-256 of every file, so that what is read is what was written.

Orbax notices files that are missing or cut short, but restores most altered bytes without a word, as other weights.
The manifest is written last, before the checkpoint gets its final name: where there is none, the checkpoint is torn.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any

NAME = "manifest.json"
CHUNK_BYTES = 2**22


class Damaged(ValueError):
    """A file of a checkpoint is not what was written; the text names it and says what is wrong."""


def write(folder: Any, content: dict[str, Any]) -> None:
    """Put `content` and the hashes of all files in `folder` into its manifest, on the disk when this returns.

    Args:
      folder: an `epath.Path`, local or in a bucket, that nothing writes to any more.
      content: JSON.
    """
    files = {}
    for path in _files(folder):
        size, digest = _hash(path, settle=True)
        files[_relative(path, folder)] = {"bytes": size, "sha256": digest}
    content = json.loads(json.dumps({**content, "files": files}))  # tuples are lists from here on
    path = folder / NAME
    path.write_text(_dump(content))
    _settle(path)
    for directory in {folder, *(folder / name.rpartition("/")[0] for name in files)}:
        _settle(directory)


def exists(folder: Any) -> bool:
    """Whether the folder has a manifest: everything else was there before it."""
    return (folder / NAME).exists()


def read(folder: Any) -> dict[str, Any]:
    """The content of the manifest, with `files`.

    Raises:
      Damaged: there is none, or it was altered.
    """
    try:
        text = (folder / NAME).read_text()
    except FileNotFoundError:
        raise Damaged(f"{NAME} is missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise Damaged(f"{NAME} cannot be read ({_reason(error)})") from error
    try:
        content = json.loads(text)["content"]
        whole = _dump(content) == text
    except (ValueError, TypeError, KeyError, RecursionError):
        whole = False
    if not whole:
        raise Damaged(f"{NAME} is not as it was written")
    return content


def check(folder: Any, content: dict[str, Any]) -> None:
    """Compare every file with its hash.

    Raises:
      Damaged: at the first that differs, by name.
    """
    for name, wanted in sorted(content["files"].items()):
        try:
            size, digest = _hash(folder / name)
        except FileNotFoundError:
            raise Damaged(f"{name} is missing") from None
        except OSError as error:
            raise Damaged(f"{name} cannot be read ({_reason(error)})") from error
        if size != wanted["bytes"]:
            raise Damaged(f"{name} has {size:,} bytes, not {wanted['bytes']:,}")
        if digest != wanted["sha256"]:
            raise Damaged(f"{name} was altered: it has another SHA-256")


def remove(folder: Any) -> None:
    """Delete a checkpoint. The manifest goes first, so that half of one is never taken for a whole one."""
    with contextlib.suppress(FileNotFoundError):
        (folder / NAME).unlink()
        folder.rmtree()


def is_local(path: Any) -> bool:
    """Whether a path is one of a file system, not of a bucket."""
    return "://" not in str(path)


def _dump(content: dict[str, Any]) -> str:
    """The text of a manifest, which also holds its own hash: any byte that changes is noticed."""
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps({"content": content, "sha256": digest}, indent=1) + "\n"


def _files(folder: Any) -> Iterator[Any]:
    for path in sorted(folder.iterdir(), key=str):
        if path.is_dir():
            yield from _files(path)
        elif path.name != NAME:
            yield path


def _relative(path: Any, folder: Any) -> str:
    return path.relative_to(folder).as_posix()


def _hash(path: Any, settle: bool = False) -> tuple[int, str]:
    """Size and SHA-256 of a file; `settle` also waits until it is on the disk."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
        if settle and is_local(path):
            os.fsync(file.fileno())
    return size, digest.hexdigest()


def _settle(path: Any) -> None:
    """Wait until a file or directory is on the disk; a bucket does so by itself."""
    if is_local(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or type(error).__name__
