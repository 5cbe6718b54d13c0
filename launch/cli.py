"""The `podracer` command. The subcommands are the functions of `launch/commands.py`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from podracer.errors import NotSaved, UserError, closest

USAGE = """usage: podracer COMMAND [OPTIONS]

Reinforcement learning at the speed of the accelerator.

  train anakin   train with environment and learner in one compiled program
  train sebulba  train with environments on the host, cores that act and cores that learn
  eval RUN       measure a trained agent
  resume RUN     go on with a run from its newest checkpoint
  render RUN     draw a trained agent playing, as GIF or MP4
  play GAME RUN  play a board game against a trained agent
  plot RUN...    learning curves of several runs or seeds in one picture
  bench sebulba  measure throughput against batch size, as a picture and CSV
  envs           list the environments
  agents         list the agents
  demo           train on Catch and CartPole, with pictures

`podracer COMMAND --help` lists the options of each. A run directory (RUN) is what `train` writes."""

COMMANDS = ("train", "eval", "resume", "render", "play", "plot", "bench", "envs", "agents", "demo")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 a run failed, 2 something given cannot work, 130 Ctrl-C;
    `podracer.exits` has the others."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _dispatch(arguments)
        sys.stdout.flush()  # here, where a reader that is gone can be told from a failure
    except UserError as error:
        print(f"podracer: {' '.join(str(error).split())}", file=sys.stderr)
        # What a library was doing (reading a damaged checkpoint, say) dies with the process, without a word.
        sys.unraisablehook = lambda _: None
        sys.exit(2)
    except NotSaved as error:
        print(f"podracer: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    except KeyboardInterrupt as interrupt:
        print(f"podracer: {str(interrupt) or 'interrupted'}", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output is gone (`podracer envs | head`); nothing is left to say to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def _dispatch(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return
    if arguments[0] == "--version":
        import importlib.metadata

        print(importlib.metadata.version("podracer"))
        return
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        raise UserError(f"unknown command '{name}'.{closest(name, COMMANDS)} `podracer --help` lists the commands.")
    # Only now what costs seconds to import: --help answers at once.
    from launch import commands

    renamed = {"eval": "evaluate", "envs": "list_envs", "agents": "list_agents"}
    getattr(commands, renamed.get(name, name))(rest)


if __name__ == "__main__":
    main()
