"""A training command, read where it is launched: what cannot work there is refused before anything costs money.

It is read and traced as the hosts would, without a compilation. Where the library of an environment is missing on this
machine, nothing is said against the command: it may be there.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any, NamedTuple

from launch.parse import take
from launch.slices import Slice
from launch.words import say
from podracer import plugins
from podracer.errors import UserError


class Place(NamedTuple):
    """Where the command is going to run."""

    hosts: int
    cores: int | None = None  # of a host, as JAX counts them; None: not known here
    name: str = ""  # of the slice
    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu")


def on_slice(piece: Slice) -> Place:
    """The hosts of a TPU slice."""
    return Place(piece.hosts, piece.jax_devices_per_host, piece.name, ("tpu",))


def check(command: list[str], place: Place) -> None:
    """Refuse `podracer train ...` where it could not work.

    Raises:
      UserError: why not.
    """
    from launch import training
    from podracer import mesh

    arguments = command[2:]  # behind podracer train
    platform = take(arguments, "platform")[0]
    if platform is not None and platform not in place.platforms:
        expected = " or ".join(place.platforms)
        raise UserError(f"--platform is {platform}; expected {expected} on {place.name or 'TPUs'}. Leave it out.")
    elsewhere = _elsewhere(arguments)
    if elsewhere is not None:
        say(f"the training command is not checked: {elsewhere} is not on this machine")
        return
    try:
        asked = training.read(arguments, "podracer launch KIND [OPTIONS] -- train")
        if asked is None:
            return
        mesh.start_backend("cpu", 1)  # whatever else this machine has is not needed
        env, agent = asked.make()
        training.with_blame(asked.references, lambda: _check_sizes(asked, env, agent, place))
    except UserError as error:
        if not _is_for_want_of_a_library(error):
            raise
        say(f"the training command is not checked: {' '.join(str(error).split())}")


def _check_sizes(asked: Any, env: Any, agent: Any, place: Place) -> None:
    cores = place.cores
    given = asked.options.cores
    if given != "auto":
        if not given.isdigit() or int(given) < 1:
            raise UserError(f"--cores is '{given}'; expected auto or a number >= 1. Leave it out for all cores.")
        if cores is not None and int(given) > cores:
            raise UserError(f"--cores is {given}; a host of {place.name} has {cores}, as JAX counts. Leave it out.")
        cores = int(given)
    if asked.architecture == "anakin":
        _check_anakin(asked.settings, env, agent, place)
    elif cores is not None:
        _check_sebulba(asked.settings, env, agent, cores, f"a host of {place.name}" if place.name else "a host")


def _check_anakin(settings: Any, env: Any, agent: Any, place: Place) -> None:
    """With one core, whose share of the work is that of any other."""
    from anakin.settings import build_loop

    if place.hosts > 1 and (settings.seeds > 1 or settings.sweep):
        raise UserError(
            f"--seeds and --sweep train on one host; there are {place.hosts}. Leave them out, or take a single host."
        )
    build_loop(agent, env, settings, 1).check()


def _check_sebulba(settings: Any, env: Any, agent: Any, cores: int, where: str) -> None:
    """The shares of the cores that learn."""
    import jax

    from podracer.envs import on_host
    from sebulba.example import example
    from sebulba.topology import num_acting

    env = on_host(env, settings.batch_size or getattr(env, "batch_size", 64))
    acting = num_acting(cores, settings.actor_cores, env.batch_size)
    learning = cores - acting if cores > 1 else 1
    if learning < 1:
        raise UserError(
            f"--actor-cores is {acting} of the {cores} cores of {where}, as JAX counts; expected at least one left to "
            f"learn. Choose --actor-cores 1 to {cores - 1}."
        )
    if env.batch_size % learning:
        raise UserError(
            f"--batch-size is {env.batch_size}, for the {learning} cores of {where} that learn ({cores} less "
            f"{acting} that act); expected a multiple of {learning}. Change --batch-size or --actor-cores."
        )
    share = settings.threads_per_core * acting * settings.accumulate * env.batch_size // learning
    if share % settings.learner_splits:
        raise UserError(
            f"--learner-splits is {settings.learner_splits}, of a batch of {share} per core that learns; expected a "
            "divisor of it. Change --learner-splits."
        )

    def update():
        state = agent.initial_learner_state(jax.random.key(0))
        trajectory = example(agent, env, share // settings.learner_splits, settings.unroll_length)
        return agent.learner_step(state, trajectory, jax.random.key(0), None)

    jax.eval_shape(update)


def _elsewhere(arguments: list[str]) -> str | None:
    """A file that the command names by a full path which is not one of this machine; it may be one of the other."""
    for flag in ("env", "agent", "network"):
        name = take(arguments, flag)[0]
        path = name.rpartition(":")[0] if name is not None and plugins.is_reference(name) else ""
        if os.path.isabs(path) and not pathlib.Path(path).exists():
            return path
    return None


def _is_for_want_of_a_library(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ImportError):
            return True
        error = error.__cause__ or error.__context__
    return False
