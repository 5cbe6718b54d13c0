"""The `podracer` command. The subcommands are the functions of `launch/commands.py`."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from podracer import exits, watchdog
from podracer.errors import UserError, brief, closest

USAGE = """usage: podracer COMMAND [OPTIONS]

Reinforcement learning at the speed of the accelerator.

  train anakin   train with environment and learner in one compiled program
  train sebulba  train with environments on the host, cores that act and cores that learn
  eval RUN       measure a trained agent
  resume RUN     go on with a run from its newest checkpoint
  render RUN     draw a trained agent playing, as GIF or MP4
  play GAME RUN  play a board game against a trained agent
  plot RUN...    learning curves of several runs or seeds in one picture
  launch KIND    train on several hosts, here or elsewhere: local, tpu-vm, gke, slurm
  bench FIGURE   throughput over cores (scaling) or a setting (sweep); cost and predict reckon with it
  compile        compile a training program for a TPU slice that is not here, and say what it needs
  doctor         what this machine has, what is missing, and what to do about it
  envs           list the environments
  agents         list the agents
  demo           train on Catch and CartPole, with pictures

`podracer COMMAND --help` lists the options of each. A run directory (RUN) is what `train` writes."""

COMMANDS = ("train", "eval", "resume", "render", "play", "plot", "launch", "bench")
COMMANDS += ("compile", "doctor", "envs", "agents", "demo")
AGAIN_S = 0.05  # until a signal whose exception was dropped comes again
# These start no training here, and answer without the seconds that JAX takes to import.
LIGHT = {"launch": "launch.launching", "doctor": "launch.doctor"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with a status of `podracer/exits.py`."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with _ends_by_sigterm():
            _dispatch(arguments)
        sys.stdout.flush()  # here, where a reader that is gone can be told from a failure
    except UserError as error:
        _say(f"podracer: {' '.join(str(error).split())}")
        # What a library was doing (reading a damaged checkpoint, say) dies with the process, without a word.
        sys.unraisablehook = lambda _: None
        _leave(error.exit_status, str(error))
    except KeyboardInterrupt as interrupt:
        _say(f"podracer: {str(interrupt) or 'interrupted'}")
        if str(interrupt):  # all hosts have stopped, and saved
            _leave_together()
        _leave(exits.INTERRUPTED, "Ctrl-C")
    except BrokenPipeError:
        # The reader of our output is gone (`podracer envs | head`); nothing is left to say to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _leave(0)
    except SystemExit as exit_:
        _leave(exit_.code)
    except Exception as error:
        _leave(_failed(error), brief(error))
    else:
        _leave_together()


@contextlib.contextmanager
def _ends_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the command with the status for it, as long as nothing in it has a better answer."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, hook = signal.signal(signal.SIGTERM, lambda *_: sys.exit(exits.PREEMPTED)), sys.unraisablehook
    sys.unraisablehook = lambda found: _again(found, hook)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        if _several_hosts() is None:  # else it is JAX's own now
            signal.signal(signal.SIGTERM, before)


def _again(found: Any, hook: Callable[[Any], object]) -> None:
    """Send a signal again whose exception was dropped; `hook` takes what else was.

    Python drops what a handler raises where it happens to run in a destructor or a callback of the garbage collector
    (JAX has one), and the program would go on.
    """
    if isinstance(found.exc_value, KeyboardInterrupt):
        number = signal.SIGINT
    elif isinstance(found.exc_value, SystemExit) and found.exc_value.code == exits.PREEMPTED:
        number = signal.SIGTERM
    else:
        hook(found)
        return
    main = threading.main_thread().ident

    def send() -> None:
        time.sleep(AGAIN_S)
        if main is not None:
            signal.pthread_kill(main, number)

    watchdog.beside(send, "signal")


def _failed(error: Exception) -> int:
    """Say what went wrong, all of it where nobody expected it; the status for it."""
    several = _several_hosts()
    if several is not None and several.is_lost_peer(error):
        _say(f"podracer: {several.why_lost(error)}; this one stops")
        return exits.PEER_LOST
    status = getattr(error, "exit_status", None)
    if status is not None:
        _say(f"podracer: {error}")
        return status
    traceback.print_exception(error)
    return exits.INTERNAL


def _leave(status: Any, why: str = "") -> None:
    """End the process. One of several hosts does not wait for the others, unless all stop together."""
    several = _several_hosts()
    if several is None:
        sys.exit(status)
    if status in (0, None, exits.PREEMPTED):
        _leave_together()
    several.leave(status or 0, " ".join(why.split())[:300])


def _leave_together() -> None:
    several = _several_hosts()
    if several is not None:
        several.disconnect()


def _several_hosts() -> Any:
    """`podracer.hosts`, where this process is one of several."""
    hosts = sys.modules.get("podracer.hosts")
    return hosts if hosts is not None and hosts.count() > 1 else None


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _dispatch(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return
    if arguments[0] == "--version":
        from importlib import metadata

        print(metadata.version("podracer"))
        return
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        raise UserError(f"unknown command '{name}'.{closest(name, COMMANDS)} `podracer --help` lists the commands.")
    if name in LIGHT:
        importlib.import_module(LIGHT[name]).main(rest)
        return
    # Only now what costs seconds to import: --help answers at once.
    from launch import commands

    renamed = {"eval": "evaluate", "envs": "list_envs", "agents": "list_agents"}
    getattr(commands, renamed.get(name, name))(rest)


if __name__ == "__main__":
    main()
