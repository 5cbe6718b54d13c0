"""Objects from a user's own file, named as `path.py:Object`; mistakes in it are reported with its file and line."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from podracer.errors import UserError, closest, unknown


def is_reference(name: str) -> bool:
    """Whether `name` is of the form `path.py:Object`, rather than the name of something built in."""
    return re.search(r"\.py(:|$)", name) is not None


def load_object(reference: str) -> Any:
    """What a user's file defines.

    The file is run once per version of it, as a module of its own, and may import its neighbours.

    Args:
      reference: `path.py:Object`, the path relative to the working directory or absolute.

    Raises:
      UserError: there is no such file, it fails (the message has the file and line), or it defines no such object.
    """
    path, name = _split(reference)
    module = _load(path)
    if not hasattr(module, name):
        defined = [key for key in vars(module) if not key.startswith("_")]
        raise unknown("object", name, defined, f"{path} does not define it; expected path.py:Object.")
    return getattr(module, name)


@contextlib.contextmanager
def blame(reference: str) -> Iterator[None]:
    """Turn exceptions from the user's file into errors that name its line: wrap calls of what it defines.

    Raises:
      UserError: `file:line: ExceptionType: text`, from the original exception.
    """
    path, _ = _split(reference)
    try:
        yield
    except Exception as error:
        raise UserError(_describe(path, error)) from error


def passes_through(reference: str | None, error: Exception) -> bool:
    """Whether an exception came out of the file that `reference` names (False for names of something built in)."""
    if reference is None or not is_reference(reference):
        return False
    path = Path(reference.rpartition(":")[0]).resolve()
    return any(Path(frame.filename).resolve() == path for frame in traceback.extract_tb(error.__traceback__))


def call(reference: str, maker: Callable[..., Any], options: dict[str, Any], flag: str) -> Any:
    """`maker(**options)`, where `maker` is what `reference` names.

    Args:
      flag: what sets an option on the command line: "env" for `--env.OPTION`.

    Raises:
      UserError: it has no such option, lacks one that it needs, or fails; the message names the options.
    """
    known, needed = _options(maker)
    for name in options:
        if known is not None and name not in known:
            there = f"It has: {', '.join(known)}." if known else "It has none."
            raise UserError(f"{reference} has no option '{name}'.{closest(name, known)} {there}")
    if missing := [name for name in needed if name not in options]:
        raise UserError(f"{reference} needs {' and '.join(missing)}; expected --{flag}.{missing[0]} VALUE.")
    try:
        with blame(reference):
            return maker(**options)
    except UserError as error:
        if not options:
            raise
        given = ", ".join(f"{name} = {value!r}" for name, value in options.items())
        raise UserError(f"{str(error).rstrip('.')}. It was given {given}: change --{flag}.*.") from error


def check_call(what: str, function: Callable[..., Any], expected: str, *positional: Any, **named: Any) -> None:
    """Refuse a function of the user's that does not take the arguments that it is about to be called with.

    Raises:
      UserError: `what` is not `expected`.
    """
    try:
        inspect.signature(function).bind(*positional, **named)
    except TypeError as error:
        raise UserError(f"{what} cannot be called: {error}; expected {expected}.") from error
    except ValueError:  # it has no signature, and will say itself what it lacks
        pass


def _options(maker: Callable[..., Any]) -> tuple[list[str] | None, list[str]]:
    """The names that a function or class takes (None: any), and those of them that have no default."""
    try:
        parameters = inspect.signature(maker).parameters.values()
    except (TypeError, ValueError):  # written in C, or wrapped beyond recognition: it will say so itself
        return None, []
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    open_ended = any(p.kind == p.VAR_KEYWORD for p in parameters)
    return None if open_ended else [p.name for p in named], [p.name for p in named if p.default is p.empty]


def _split(reference: str) -> tuple[Path, str]:
    file, _, name = reference.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise UserError(f"'{reference}' does not name an object in a file; expected path.py:Object.")
    path = Path(file)
    if not path.is_file():
        neighbours = [entry.name for entry in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise UserError(f"there is no file {path}.{closest(path.name, neighbours)} Expected path.py:Object.")
    return path, name


def _load(path: Path) -> ModuleType:
    full = path.resolve()
    version = f"{full}:{full.stat().st_mtime_ns}:{full.stat().st_size}"
    # A name of its own, so that a file called jax.py hides nothing; the same module again as long as the file does
    # not change, so that the same classes compare equal and compiled functions are reused.
    name = f"podracer_user_{full.stem}_{hashlib.sha256(version.encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, full)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up here
    folder = str(full.parent)
    added = folder not in sys.path
    if added:
        sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, Exception):
            raise UserError(_describe(path, error)) from error
        raise
    finally:
        if added and folder in sys.path:
            sys.path.remove(folder)
    return module


def _describe(path: Path, error: Exception) -> str:
    """`file:line: ExceptionType: text`, where the line is the innermost one in the user's file."""
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    text = " ".join(text.split())
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    full = path.resolve()
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).resolve() == full
    ]
    return f"{path}:{lines[-1]}: {text}" if lines else f"{path}: {text}"
