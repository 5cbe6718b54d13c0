"""`podracer compile`: the training program for a TPU slice, compiled on a machine that has none, and what it needs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import re
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from launch import program
from launch.parse import parse
from launch.topology import Topology, describe, full_name, topology_shape
from podracer import mesh
from podracer.errors import UserError, check_divides, check_number

FULL = 0.9  # of the memory: XLA and its transfers need some, too


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `compile`, before `--`."""

    topology: str = ""
    """GENERATION:SHAPE in chips, such as v5e:4x4, v3:32x32 or v4:8x8x16; or a slice's name, such as v5litepod-16."""
    slices: int = 1
    """How many such slices train together."""
    json: bool = False
    """Print one JSON object instead of words."""
    hlo: str | None = None
    """File for the compiled program as XLA writes it."""


class Program(NamedTuple):
    """One compiled program, with what must be known to judge it."""

    title: str
    traced: Any
    compiled: Any
    seconds: float  # to compile
    updates: int  # learner steps per call
    cores: int


def main(arguments: list[str]) -> None:
    """`podracer compile --topology TOPOLOGY [OPTIONS] -- train ARCHITECTURE [OPTIONS]`."""
    text = "Compile a training program for a TPU slice, without one, and say what it needs."
    own, rest = _split(arguments)
    options = parse(Options, own, "podracer compile", f"{text} Behind --: train and its arguments.")
    check_number("--slices", options.slices, minimum=1)
    name = full_name(options.topology)
    shape = topology_shape(name)
    if rest[:1] != ["train"]:
        raise UserError(
            f"compile got '{' '.join(rest[:1])}' behind --; expected train ARCHITECTURE and its options, "
            "as in: podracer compile --topology v5e:4x4 -- train anakin --env catch --agent ppo"
        )
    from launch import training

    asked = training.read(rest[1:], "podracer compile --topology ... -- train")
    if asked is None:
        return
    if asked.options.cores != "auto" or asked.options.platform is not None:
        raise UserError("compile takes all cores of the topology; leave out --cores and --platform.")
    mesh.start_backend("cpu", 1)
    env, agent = asked.make()
    topology = describe(name, shape, options.slices)
    make = {"anakin": anakin_programs, "sebulba": sebulba_programs}[asked.architecture]
    with mesh.made_for("tpu"):
        programs = make(agent, env, asked.settings, topology)
    if options.hlo is not None:
        _write(options.hlo, programs[0].compiled.as_text())
    reports = [report(each, topology, agent) for each in programs]
    if options.json:
        print(json.dumps({"topology": topology.name, "cores": len(topology.devices), "programs": reports}))
    else:
        say(topology, reports)
    if not all(each["fits"] for each in reports):
        sys.exit(1)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in arguments:
        return arguments, []
    place = arguments.index("--")
    return arguments[:place], arguments[place + 1 :]


def anakin_programs(agent: Any, env: Any, settings: Any, topology: Topology) -> list[Program]:
    """Anakin's one program, over every core."""
    from anakin.settings import build_loop

    loop = build_loop(agent, env, settings, None, mesh.over(topology.devices))
    traced = loop.trace()
    title = f"Anakin, {loop.batch_per_core} environments per core, unroll {loop.unroll_length}"
    return [_compile(title, traced, loop.updates_per_call, loop.num_cores, topology)]


def sebulba_programs(agent: Any, env: Any, settings: Any, topology: Topology) -> list[Program]:
    """The learner's program, over the learner cores of all hosts. The cores that act run programs of their own."""
    import jax

    from podracer import envs
    from sebulba.example import example
    from sebulba.learner import Learner
    from sebulba.topology import num_acting

    batch_size = settings.batch_size or getattr(env, "batch_size", 64)
    env, acting = envs.on_host(env, batch_size), num_acting(len(topology.hosts[0]), settings.actor_cores, batch_size)
    learning = [device for host in topology.hosts for device in _learning(host, acting, topology.name)]
    per_host = len(learning) // len(topology.hosts)
    check_divides("batch_size", batch_size, "learner cores per host", per_host)
    threads = settings.threads_per_core * acting * settings.accumulate
    learner = Learner(
        agent,
        mesh.over(topology.devices[: len(learning)]),
        threads,
        settings.learner_splits,
        jax.random.key(settings.seed),
    )
    size, unroll = batch_size * len(topology.hosts), settings.unroll_length
    trajectory = jax.eval_shape(lambda: example(agent, env, size, unroll))
    title = f"Sebulba's learner, {threads} x {batch_size} environments per host, unroll {unroll}"
    return [_compile(title, learner.trace(trajectory), settings.learner_splits, len(learning), topology)]


def _learning(host: list[Any], acting: int, name: str) -> list[Any]:
    """The devices of a host that learn; a single one does both."""
    if acting >= len(host) > 1:
        expected = f"expected at most {len(host) - 1}, so that one is left to learn"
        raise UserError(f"--actor-cores is {acting}; {expected} of the {len(host)} cores of a host of {name}.")
    return host[acting:] if len(host) > 1 else host


def _compile(title: str, traced: Any, updates: int, cores: int, topology: Topology) -> Program:
    started = time.perf_counter()
    try:
        with _without_compilation_cache():
            compiled = traced.lower().compile()
    except Exception as error:
        text = " ".join(str(error).split())
        if "RESOURCE_EXHAUSTED" not in text and "memory" not in text.lower():
            raise
        found = re.search(r"Used [^.]*\.\S+ of \S+ hbm[^.]*\.[^.]*", text)
        raise UserError(
            f"{title}: it does not fit {topology.name}, {topology.memory_bytes / 2**30:.0f} GiB per core "
            f"({found[0] if found else text[:200]}). {REMEDY}"
        ) from None
    return Program(title, traced, compiled, time.perf_counter() - started, updates, cores)


@contextlib.contextmanager
def _without_compilation_cache() -> Iterator[None]:
    """Nothing is read from it and nothing kept there: it can load only what runs here."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    kept = jax.config.jax_enable_compilation_cache  # pyright: ignore
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it asks for the setting only once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", kept)
        compilation_cache.reset_cache()


REMEDY = "Lower the batch size, the unroll length, the width of the network or the replay, or take more cores."


def report(made: Program, topology: Topology, agent: Any) -> dict[str, Any]:
    """All that is known of a program, per core and per learner step."""
    import jax
    import jax.numpy as jnp

    params = jax.eval_shape(agent.initial_learner_state, jax.random.key(0)).params
    weights = [leaf for leaf in jax.tree.leaves(params) if jnp.issubdtype(leaf.dtype, jnp.floating)]  # counters are not
    param_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in weights)
    text, done = made.compiled.as_text(), program.work(made.traced.jaxpr)
    used, moved = program.used_bytes(made.compiled), program.collectives(text)
    estimate = (made.compiled.cost_analysis() or {}).get("optimal_seconds", -1.0)
    return {
        "program": made.title,
        "cores": made.cores,
        "compile_s": round(made.seconds, 1),
        "updates_per_call": made.updates,
        "memory_bytes": used,
        "memory_of_core_bytes": topology.memory_bytes,
        "fits": used < FULL * topology.memory_bytes,
        "param_bytes": param_bytes,
        "gflop_per_update": done.flops / made.updates / 1e9,
        "loops_of_unknown_length": done.unbounded,
        "reduced_bytes_per_update": sum(size * times for _, size, times in done.sums) // made.updates,
        "collectives": [each._asdict() for each in moved],
        "host": done.host + program.talks_to_host(text),
        # XLA's own guess, which counts the body of a loop once and no transfers; it says -2 where it has none.
        "xla_estimate_s": estimate if estimate > 0 else None,
    }


def say(topology: Topology, reports: list[dict[str, Any]]) -> None:
    """The reports in words."""
    count, hosts = len(topology.devices), len(topology.hosts)
    kind = topology.devices[0].device_kind
    print(f"{topology.name}: {count:,} cores ({kind}) on {hosts:,} host{'s' if hosts > 1 else ''}, none of them here")
    for each in reports:
        print(f"\n{each['program']}: compiled for {each['cores']:,} cores in {each['compile_s']} s")
        for name, text in _lines(each):
            print(f"  {name:<13} {text}")


def _lines(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What `say` prints of one program."""
    used, there = found["memory_bytes"], found["memory_of_core_bytes"]
    verdict = "it fits" if found["fits"] else f"it does NOT fit (more than {FULL:.0%}). {REMEDY}"
    yield "memory", f"{used / 1e6:,.1f} MB per core, {used / there:.1%} of {there / 2**30:.0f} GiB: {verdict}"
    unknown = " (a loop of unknown length counts once)" if found["loops_of_unknown_length"] else ""
    flops = f"{found['gflop_per_update']:,.3f} Gflop per update and core"
    yield "arithmetic", f"{flops}, matrix products and convolutions{unknown}"
    reduced, params = found["reduced_bytes_per_update"], found["param_bytes"]
    yield "between cores", f"{reduced / 1e6:,.3f} MB reduced per update; parameters are {params / 1e6:,.3f} MB"
    for each in found["collectives"]:
        arrays = f"{each['arrays']} array{'s' if each['arrays'] > 1 else ''}"
        if each["per_call"] and found["updates_per_call"] > 1:
            mark = f" (once per call of {found['updates_per_call']:,} updates)"
        else:
            mark = " (the gradients)" if each["num_bytes"] >= params else ""
        yield "", f"{each['kind']} of {arrays}, {each['num_bytes']:,} bytes{mark}"
    yield "host", ", ".join(found["host"]) or "nothing inside the program asks it"


def _write(path: str, text: str) -> None:
    try:
        pathlib.Path(path).write_text(text)
    except OSError as error:
        raise UserError(f"--hlo {path} cannot be written: {error.strerror}. Choose another file.") from error
