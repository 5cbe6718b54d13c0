"""Plain data as YAML, in blocks, as people read and edit it; and files of a launch, written or printed."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from podracer.errors import UserError

# Text that YAML reads as itself; anything else is written as JSON, which YAML includes.
PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
WORDS = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")


def to_yaml(data: Any) -> str:
    """Dictionaries, lists, text, numbers and booleans as YAML."""
    return "\n".join(_lines(data)) + "\n"


def _lines(data: Any) -> Iterator[str]:
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _entry(f"{_scalar(key)}:", value, indent="" if isinstance(value, list) else "  ")
    elif isinstance(data, list):
        for value in data:
            first, *rest = _lines(value) if _is_block(value) else [_scalar(value)]
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)


def _entry(key: str, value: Any, indent: str) -> Iterator[str]:
    if _is_block(value):
        yield key
        yield from (indent + line for line in _lines(value))
    else:
        yield f"{key} {_scalar(value)}"


def _is_block(value: Any) -> bool:
    return isinstance(value, dict | list) and bool(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str) and PLAIN.fullmatch(value) and value.lower() not in WORDS:
        return value
    return json.dumps(value)


def write(folder: str | None, files: dict[str, str]) -> list[str]:
    """Write the files into a new or existing folder, or print them where it is None; the paths.

    Raises:
      UserError: the folder cannot be written, or one of the files exists with another content.
    """
    if folder is None:
        for name, text in files.items():
            print(f"# ---- {name}\n{text}", end="", flush=True)
        return []
    paths = [pathlib.Path(folder) / name for name in files]
    for path, text in zip(paths, files.values(), strict=True):
        if path.exists() and path.read_text() != text:
            raise UserError(f"--out {path} exists, with another content; expected a new file. Choose another --out.")
    try:
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, files.values(), strict=True):
            path.write_text(text)
    except OSError as error:
        raise UserError(f"--out {folder} cannot be written: {error.strerror}. Choose another --out.") from None
    return [str(path) for path in paths]
