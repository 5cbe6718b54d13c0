"""Flags from dataclasses, by tyro; its errors shortened to one line."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import datetime
import io
import pathlib
import re
import typing
from typing import Annotated, Any

from podracer import exits
from podracer.errors import UserError, closest


def parse(kind: Any, arguments: list[str], prog: str, description: str) -> Any:
    """An instance of the dataclass `kind` from command-line arguments. `--help` prints and exits.

    Raises:
      UserError: a flag is unknown or its value does not fit; one line.
    """
    import tyro

    kind = _without_underscores(kind)
    arguments = _switches(arguments, booleans(kind))
    given = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    for flag in given:
        if given.count(flag) > 1:
            raise UserError(f"{flag} is given twice; expected once, with all its values. Remove one.")
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(
                kind,
                args=arguments,
                prog=prog,
                description=description,
                config=(tyro.conf.FlagConversionOff,),
            )
    except SystemExit as exit_:
        if exit_.code != exits.BAD_INPUT:  # --help, or a signal at this moment
            raise
        raise UserError(_one_line(errors.getvalue(), flags(kind), prog)) from None


def _without_underscores(kind: Any) -> Any:
    """`kind`, with flags such as --from for fields such as `from_`, whose metadata holds their help."""
    import tyro

    hints = typing.get_type_hints(kind)
    fields: list[Any] = []
    for field in dataclasses.fields(kind):
        if field.name.endswith("_") and "help" in field.metadata:
            arg = tyro.conf.arg(name=field.name[:-1], help=field.metadata["help"])
            fields.append((field.name, Annotated[hints[field.name], arg], dataclasses.field(default=field.default)))
    if not fields:
        return kind
    return dataclasses.make_dataclass(kind.__name__, fields, bases=(kind,), frozen=True)


def flags(kind: Any, prefix: str = "--") -> list[str]:
    """All flags of a dataclass and the dataclasses in it, as they are typed."""
    found = []
    for field in dataclasses.fields(kind):
        name = prefix + field.name.rstrip("_").replace("_", "-")
        nested = field.default if dataclasses.is_dataclass(field.default) else None
        found += flags(nested, name + ".") if nested is not None else [name]
    return found


def booleans(kind: Any, prefix: str = "--") -> list[str]:
    """The flags that are True or False, as they are typed."""
    found = []
    for field in dataclasses.fields(kind):
        name = prefix + field.name.replace("_", "-")
        if dataclasses.is_dataclass(field.default):
            found += booleans(field.default, name + ".")
        elif isinstance(field.default, bool):
            found.append(name)
    return found


def _switches(arguments: list[str], known: list[str]) -> list[str]:
    """`--probe` and `--no-probe` (`--agent.no-x`) as `--probe True` and `--probe False`."""
    off = {
        f"{flag.rpartition('.')[0]}.no-{flag.rpartition('.')[2]}" if "." in flag else f"--no-{flag[2:]}": flag
        for flag in known
    }
    written = []
    for position, argument in enumerate(arguments):
        following = arguments[position + 1] if position + 1 < len(arguments) else "--"
        if argument in off:
            written += [off[argument], "False"]
        elif argument in known and following.startswith("--"):
            written += [argument, "True"]
        else:
            written.append(argument)
    return written


def take(arguments: list[str], name: str, default: str | None = None) -> tuple[str | None, list[str]]:
    """The value of `--name VALUE` or `--name=VALUE`, and the arguments without it.

    Raises:
      UserError: the value is missing.
    """
    if sum(argument.partition("=")[0] == f"--{name}" for argument in arguments) > 1:
        raise UserError(f"--{name} is given twice; expected once. Remove one.")
    value, rest, position = default, [], 0
    while position < len(arguments):
        argument = arguments[position]
        if argument == f"--{name}":
            if position + 1 == len(arguments) or arguments[position + 1].startswith("--"):
                raise UserError(f"--{name} has no value; expected one. Write --{name} NAME.")
            value, position = arguments[position + 1], position + 2
        elif argument.startswith(f"--{name}="):
            value, position = argument.partition("=")[2], position + 1
        else:
            rest.append(argument)
            position += 1
    return value, rest


def take_options(arguments: list[str], prefix: str) -> tuple[dict[str, Any], list[str]]:
    """All `--prefix.key VALUE`, as Python values where they read as such, and the other arguments."""
    options: dict[str, Any] = {}
    names = {a.partition("=")[0].removeprefix("--") for a in arguments if a.startswith(f"--{prefix}.")}
    for name in sorted(names):
        value, arguments = take(arguments, name)
        assert value is not None
        try:
            options[name.removeprefix(f"{prefix}.").replace("-", "_")] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name.removeprefix(f"{prefix}.").replace("-", "_")] = value
    return options, arguments


def default_directory(env: str, agent: str) -> pathlib.Path:
    """Where a run goes that was given no --run: runs/ENV-AGENT-DATE."""

    def short(name: str) -> str:
        return pathlib.Path(name.partition(":")[0]).stem if ".py" in name else name.replace("/", "-")

    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return pathlib.Path("runs") / f"{short(env)}-{short(agent)}-{now}"


def _one_line(text: str, known: list[str], prog: str) -> str:
    """The first paragraph of tyro's box, and a suggestion for an unknown flag."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip(" │╭╮╰╯─|+") for line in text.splitlines()]
    # A terminal without Unicode gets rulers of dashes instead of a box; the first line is the title.
    body = [line if line.strip("-") else "" for line in lines[1:]]
    body = body[next((i for i, line in enumerate(body) if line), 0) :]
    stop = next((i for i, line in enumerate(body) if not line), len(body))
    message = " ".join(body[:stop]).strip() or " ".join(filter(None, lines))
    unknown = re.match(r"Unrecognized options: (-\S+?)(,|$| )", message)
    if unknown:
        flag = unknown[1].partition("=")[0]
        return f"unknown flag {flag}.{closest(flag, known)} `{prog} --help` lists them."
    if message.startswith("Missing from "):
        lacking = re.findall(r"(--[\w.-]+) \S+ (.*?)\.? \(required\)", message)
        if len(lacking) == 1:
            return f"{lacking[0][0]} is missing; expected a value. {lacking[0][1]}. See {prog} --help."
        if lacking:
            names = " and ".join(flag for flag, _ in lacking)
            return f"{names} are missing; expected a value for each. See {prog} --help."
    # A config's own check says all there is to say; what tyro was doing then does not help.
    message = re.sub(r"^Error parsing (agent|network|[a-z]+): ", "", message)
    number = r"^Error parsing (--\S+): (?:invalid literal for int.*: |could not convert string to float: )'(.*)'"
    message = re.sub(number, r"\1 is '\2'; expected a number", message)
    optional = r"^Error parsing (--\S+): no type matching \{None\}\|(?:INT|FLOAT) could be instantiated from \['(.*)'\]"
    message = re.sub(optional, r"\1 is '\2'; expected a number", message)
    message = re.sub(r"^Missing value for argument '(\S+)'.*", r"\1 has no value; expected one", message)
    return f"{message.rstrip('.')}. See {prog} --help."
