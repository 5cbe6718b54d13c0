"""The flags of `train`, from the dataclasses of an architecture, an agent and a network."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
import typing
from typing import Annotated, Any

from launch.machine import Machines


def flags(names: dict[str, tuple[str, str | None]], settings: Any, agent_config: Any, network: Any) -> type:
    """A dataclass with the fields of `settings`, and `--agent.*` and `--network.*`, as tyro reads it.

    `names` (help, value) were taken before parsing, because the other flags depend on them; `--help` lists them first.
    """
    import tyro

    def flag(field: dataclasses.Field, default: Any, kind: Any, text: str | None) -> tuple:
        return field.name, Annotated[kind, tyro.conf.arg(help=text)], dataclasses.field(default=default)

    def flag_of_run(name: str, text: str, kind: Any, default: Any) -> tuple:
        return name, Annotated[kind, tyro.conf.arg(help=text)], dataclasses.field(default=default)

    hints = typing.get_type_hints(type(settings))
    docs = _field_texts(type(settings))
    fields: list[tuple] = [
        (f"{name}_", Annotated[str | None, tyro.conf.arg(name=name, help=text)], dataclasses.field(default=value))
        for name, (text, value) in names.items()
    ]
    fields += [
        flag(field, getattr(settings, field.name), hints[field.name], docs.get(field.name))
        for field in dataclasses.fields(settings)
    ]
    fields.append(
        flag_of_run("run", "Directory of the run; must not exist. None: runs/ENV-AGENT-DATE.", str | None, None)
    )
    text = "Go on where --run holds this very run with a checkpoint, so that the same command can be repeated."
    fields.append(flag_of_run("or_resume", text, bool, False))
    hints, docs = typing.get_type_hints(Machines), _field_texts(Machines)
    fields += [
        flag(field, field.default, hints[field.name], docs.get(field.name)) for field in dataclasses.fields(Machines)
    ]
    for name, value in {"agent": agent_config, "network": network}.items():
        if dataclasses.is_dataclass(value):
            fields.append((name, type(value), dataclasses.field(default=value)))
    return dataclasses.make_dataclass("Options", fields, frozen=True)


def _field_texts(kind: type) -> dict[str, str]:
    """The string below each field of a dataclass and its bases."""
    texts = {}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            texts |= _own_texts(base)
    return texts


def _own_texts(kind: type) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body  # type: ignore[attr-defined]
    texts = {}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            texts[field.target.id] = str(text.value.value)  # type: ignore[union-attr]
    return texts
