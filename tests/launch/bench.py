"""What the tests of `podracer bench` share."""

from __future__ import annotations

from launch import cli


def bench(*arguments) -> int | str:
    """The exit status of `podracer bench ARGUMENTS`, run in this process."""
    try:
        cli.main(["bench", *map(str, arguments)])
    except SystemExit as exit_:
        return exit_.code or 0
    return 0
