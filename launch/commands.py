"""The subcommands of `podracer`, each a function of its command-line arguments."""

from __future__ import annotations

import sys

import muzero  # noqa: F401  # its agents and network get their names
from launch.play import play
from launch.trained import evaluate, plot, render
from launch.training import resume, train
from podracer import config, envs
from podracer.errors import UserError

__all__ = [
    "bench",
    "compile",
    "demo",
    "evaluate",
    "list_agents",
    "list_envs",
    "play",
    "plot",
    "render",
    "resume",
    "train",
]


def list_envs(arguments: list[str]) -> None:
    """`podracer envs`."""
    _no_options(arguments, "envs", "List the environments that --env takes.")
    rows = [*envs.names(), ("path.py:Object", "an environment of yours: an object, class or function in a file")]
    width = max(len(name) for name, _ in rows) + 2
    for name, text in rows:
        print(f"{name:<{width}}{text}")


def list_agents(arguments: list[str]) -> None:
    """`podracer agents`."""
    _no_options(arguments, "agents", "List the agents that --agent takes.")
    for name, maker in sorted(config.AGENTS.items()):
        print(f"{name:<28}{(sys.modules[maker.__module__].__doc__ or '').splitlines()[0]}")
    print(f"{'path.py:Object':<28}an agent of yours: a function (spec) -> Agent in a file")


def bench(arguments: list[str]) -> None:
    """`podracer bench FIGURE [OPTIONS]`."""
    from launch import bench as figures

    figures.main(arguments)


def compile(arguments: list[str]) -> None:
    """`podracer compile --topology TOPOLOGY -- train ...`."""
    from launch import compile as ahead

    ahead.main(arguments)


def demo(arguments: list[str]) -> None:
    """`podracer demo [OPTIONS]`."""
    from launch import demo as show

    show.main(arguments)


def _no_options(arguments: list[str], command: str, text: str) -> None:
    if {"-h", "--help"} & set(arguments):
        print(f"usage: podracer {command}\n\n{text}")
        sys.exit(0)
    if arguments:
        raise UserError(f"{command} takes no options; got '{arguments[0]}'. Write podracer {command}.")
