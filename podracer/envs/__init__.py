"""Environments: small ones of our own, adapters to other libraries, and `make`, which finds any of them by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from podracer import plugins
from podracer.envs import ale, api, brax, craftax, envpool, gymnasium, gymnax, jumanji, navix, pgx, xminigrid
from podracer.envs.ale import Ale
from podracer.envs.batch import Batch, TimeLimit
from podracer.envs.brax import Brax
from podracer.envs.cartpole import CartPole
from podracer.envs.catch import Catch
from podracer.envs.craftax import Craftax
from podracer.envs.envpool import Envpool
from podracer.envs.gridworld import GridWorld
from podracer.envs.gymnasium import Gymnasium
from podracer.envs.gymnax import Gymnax
from podracer.envs.host import is_host, jittable, on_host
from podracer.envs.jumanji import Jumanji
from podracer.envs.memory_chain import MemoryChain
from podracer.envs.navix import Navix
from podracer.envs.pgx import Pgx
from podracer.envs.with_state import WithState, for_evaluation, with_state
from podracer.envs.xminigrid import XMiniGrid
from podracer.errors import UserError, closest, unknown

__all__ = [
    "Ale",
    "Batch",
    "Brax",
    "CartPole",
    "Catch",
    "Craftax",
    "Envpool",
    "GridWorld",
    "Gymnasium",
    "Gymnax",
    "Jumanji",
    "MemoryChain",
    "Navix",
    "Pgx",
    "TimeLimit",
    "WithState",
    "XMiniGrid",
    "for_evaluation",
    "is_host",
    "is_host_name",
    "jittable",
    "make",
    "names",
    "on_host",
    "with_state",
]

_OWN: dict[str, tuple[Callable[..., Any], str]] = {
    "catch": (Catch, "a ball falls, the paddle must be under it (10 x 5 grid)"),
    "gridworld": (GridWorld, "walk to a goal between the walls of four rooms"),
    "cartpole": (CartPole, "balance a pole on a cart, 500 steps"),
    "cartpole-masked": (
        lambda max_steps=500: CartPole(max_steps, mask_velocity=True),
        "cartpole without velocities: needs a memory",
    ),
    "memory-chain": (MemoryChain, "repeat a cue seen some steps before: needs a memory"),
}
_FAMILIES: dict[str, tuple[Callable[..., Any], dict[str, str]]] = {
    "gymnax": (Gymnax, gymnax.NAMES),
    "minatar": (
        lambda name, **options: Gymnax(f"{name}-MinAtar", **options),
        {name.removesuffix("-MinAtar"): text for name, text in gymnax.NAMES.items() if name.endswith("-MinAtar")},
    ),
    "brax": (Brax, dict.fromkeys(brax.NAMES, "rigid-body task of brax, continuous actions")),
    "jumanji": (Jumanji, jumanji.NAMES),
    "navix": (Navix, dict.fromkeys(navix.NAMES, "MiniGrid task of navix")),
    "xminigrid": (XMiniGrid, xminigrid.NAMES),
    "craftax": (Craftax, dict.fromkeys(craftax.NAMES, "open world: mine, craft, fight, descend")),
    "pgx": (Pgx, dict.fromkeys(pgx.NAMES, "game of pgx; opponent='random', 'self' or a function")),
}
# Environments on the host, which only Sebulba drives; one line each, as a library may have hundreds.
_HOST_FAMILIES: dict[str, tuple[Callable[..., Any], str, tuple[str, ...], str]] = {
    "atari": (
        envpool.atari,
        "GAME",
        envpool.GAMES,
        f"{len(envpool.GAMES)} Atari games such as atari/Pong (envpool, on the host); protocol='machado' or 'classic'",
    ),
    "ale": (ale.make, "GAME", ("Pong",), "the same games in ale-py's own vector environment, such as ale/Pong"),
    "envpool": (envpool.task, "TASK", ("CartPole-v1",), "any task of envpool, such as envpool/CartPole-v1"),
    "gymnasium": (gymnasium.make, "ID", ("CartPole-v1",), "any environment of Gymnasium, as gymnasium/CartPole-v1"),
}


def names() -> list[tuple[str, str]]:
    """`(name, one-line description)` of everything that `make` knows, without importing the libraries."""
    own = [(name, description) for name, (_, description) in _OWN.items()]
    jitted = [
        (f"{family}/{name}", text) for family, (_, members) in _FAMILIES.items() for name, text in members.items()
    ]
    return own + jitted + [(f"{family}/{word}", text) for family, (_, word, _, text) in _HOST_FAMILIES.items()]


def is_host_name(name: str) -> bool:
    """Whether a name is of a family whose environments run on the host. Their specs are known before JAX starts."""
    return name.partition("/")[0] in _HOST_FAMILIES and "/" in name


def make(name: str, **options: Any) -> Any:
    """The environment of that name.

    Args:
      name: a name from `names()`, or `path.py:Object` for an environment of your own; Object is an environment, or
        a class or function that returns one.
      options: passed to the environment: `make("catch", rows=8)`, `make("pgx/connect_four", opponent="self")`.

    Raises:
      UserError: there is no such environment or option, its library is not installed, or the user's file fails.
    """
    if plugins.is_reference(name):
        return _from_file(name, options)
    if name in _OWN:
        factory, _ = _OWN[name]
        known = list(inspect.signature(factory).parameters)
        for option in options:
            if option not in known:
                raise UserError(f"{name} has no option '{option}'.{closest(option, known)} It has: {', '.join(known)}.")
        return factory(**options)
    family, slash, member = name.partition("/")
    if slash and family in _HOST_FAMILIES:
        if "batch_size" in options:
            raise UserError(f"batch_size is no option of {name} but a setting of the run: --batch-size.")
        return _HOST_FAMILIES[family][0](member, **options)
    if slash and family in _FAMILIES:
        factory, _ = _FAMILIES[family]
        try:
            return factory(member, **options)
        except TypeError as error:
            raise UserError(f"{name} does not accept the options {sorted(options)}: {error}.") from error
    hosted = [f"{family}/{member}" for family, (_, _, members, _) in _HOST_FAMILIES.items() for member in members]
    known_names = [known for known, _ in names()] + hosted
    raise unknown("environment", name, known_names, "List them with `podracer envs`, or give path.py:Object.")


def _from_file(reference: str, options: dict[str, Any]) -> Any:
    found = plugins.load_object(reference)
    is_environment = not inspect.isclass(found) and _missing(found) == []
    if is_environment and options:
        raise UserError(f"{reference} is an environment already and takes no options; got {sorted(options)}.")
    if not is_environment and callable(found):
        found = plugins.call(reference, found, options, "env")
    if hasattr(found, "observation_space") and hasattr(found, "action_space"):
        raise UserError(
            f"{reference} is an environment of Gymnasium; expected one of podracer. Register it with "
            "gymnasium.register in a module, and name it as gymnasium/MODULE:ID."
        )
    lacking = _missing(found)
    if lacking:
        raise UserError(
            f"{reference} gives a {type(found).__name__} without {' and '.join(lacking)}; expected an environment "
            "with spec, reset(key) and step(state, action, key), or a host environment with spec, batch_size and "
            "start(seeds)."
        )
    env: Any = found
    with plugins.blame(reference):
        spec = env.spec
    if not isinstance(spec, api.Spec):
        raise UserError(
            f"{reference}: spec is a {type(spec).__name__}; expected a podracer.envs.api.Spec with a name, "
            "an observation and an action."
        )
    return env


def _missing(found: Any) -> list[str]:
    """The members of `api.Environment` that an object lacks. `spec` is looked up on the class: it may raise.

    An object with `start` means to be a `HostEnvironment`.
    """
    has_spec = hasattr(type(found), "spec") or "spec" in getattr(found, "__dict__", {})
    lacking = [] if has_spec else ["spec"]
    if callable(getattr(found, "start", None)):
        return lacking + ([] if hasattr(found, "batch_size") else ["batch_size"])
    return lacking + [name for name in ("reset", "step") if not callable(getattr(found, name, None))]
