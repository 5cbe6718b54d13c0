"""What a compiled program does: memory, arithmetic, what it sends between cores. Reads JAX's and XLA's own texts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.extend.core
import numpy as np

REDUCTIONS = ("psum", "psum_invariant", "pmin", "pmax", "all_gather", "all_to_all", "ppermute", "reduce_scatter")
HOST = ("pure_callback", "io_callback", "debug_callback", "debug_print", "infeed", "outfeed")
BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "f16": 2, "f8e4m3fn": 1, "f8e5m2": 1}
KINDS = "all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all"
COLLECTIVE = re.compile(rf" = (?P<result>.*?) (?P<kind>{KINDS})(?P<start>-start)?\(")
ARRAY = re.compile(r"\b(pred|bf16|[subf]\d+(?:e\dm\d\w*)?)\[([\d,]*)\]")
FROM_HOST = re.compile(r" (infeed|outfeed|send|recv)\(|custom_call_target=\"[^\"]*(?:callback|HostCompute)[^\"]*\"")


class Work(NamedTuple):
    """What one core does in one call, counted in the program as it was traced: loops as often as they run."""

    flops: float  # of matrix products and convolutions; a multiplication and an addition are two
    sums: list[tuple[str, int, int]]  # (primitive, bytes of its arrays, times per call)
    host: list[str]  # primitives that call the host
    unbounded: bool  # there is a loop whose length is not known: it counts once


class Collective(NamedTuple):
    """One instruction of the compiled program that moves data between cores."""

    kind: str  # all-reduce, all-gather, ...
    arrays: int
    num_bytes: int
    per_call: bool  # outside of every loop: once per call, of many updates


def work(jaxpr: Any) -> Work:
    """Count a traced program (`jax.jit(f).trace(...).jaxpr`); inside a `shard_map`, shapes are those of one core."""
    flops, sums, host, unbounded = 0.0, [], [], False
    for eqn, times, known in _equations(jaxpr.jaxpr, 1):
        name = eqn.primitive.name
        unbounded |= not known
        if name in ("dot_general", "conv_general_dilated"):
            flops += times * _flops(eqn)
        elif name in REDUCTIONS:
            sums.append((name, sum(_num_bytes(var.aval) for var in eqn.outvars), times))
        elif name in HOST:
            host.append(name)
    return Work(flops, sums, host, unbounded)


def _equations(jaxpr: Any, times: int, known: bool = True) -> Iterator[tuple[Any, int, bool]]:
    """All equations, with how often each runs; of the branches of a `cond` the first counts."""
    for eqn in jaxpr.eqns:
        yield eqn, times, known
        name = eqn.primitive.name
        inner = [part for value in eqn.params.values() for part in _programs(value)]
        if name == "scan":
            yield from _equations(inner[0], times * eqn.params["length"], known)
        elif name == "while":
            yield from _equations(eqn.params["body_jaxpr"].jaxpr, times, False)
        else:
            for part in inner[:1] if name == "cond" else inner:
                yield from _equations(part, times, known)


def _programs(value: Any) -> list[Any]:
    """The programs in a parameter of an equation."""
    if isinstance(value, jax.extend.core.ClosedJaxpr):
        return [value.jaxpr]
    if isinstance(value, jax.extend.core.Jaxpr):
        return [value]
    return [part for each in value for part in _programs(each)] if isinstance(value, tuple | list) else []


def _flops(eqn: Any) -> float:
    out, kernel = eqn.outvars[0].aval, eqn.invars[1].aval
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        left = eqn.invars[0].aval
        return 2.0 * out.size * math.prod(left.shape[axis] for axis in contracted)
    layout = eqn.params["dimension_numbers"].rhs_spec  # (features out, features in, *space)
    return 2.0 * out.size * math.prod(kernel.shape[axis] for axis in layout[1:])


def _num_bytes(aval: Any) -> int:
    return aval.size * np.dtype(aval.dtype).itemsize


def collectives(text: str) -> list[Collective]:
    """The instructions of a compiled program (`compiled.as_text()`) that move data between cores."""
    found, outside = [], False
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):  # a computation: the program's own, or of a loop or branch
            outside = line.startswith("ENTRY")
        match = COLLECTIVE.search(line)
        if match is None:
            continue
        arrays = [_array_bytes(*each) for each in ARRAY.findall(match["result"])]
        if match["start"] and match["kind"] != "all-reduce":
            arrays = arrays[len(arrays) // 2 :]  # (operands, results)
        found.append(Collective(match["kind"], len(arrays), round(sum(arrays)), outside))
    return found


def talks_to_host(text: str) -> list[str]:
    """The instructions of a compiled program that wait for the host or send it something."""
    return sorted({match[0].strip(" (") for match in FROM_HOST.finditer(text)})


def _array_bytes(kind: str, shape: str) -> float:
    size = math.prod(int(length) for length in shape.split(",") if length)
    return size * (BYTES.get(kind) or int(re.sub(r"\D.*", "", kind[1:])) / 8)


def used_bytes(compiled: Any) -> int:
    """Memory that a compiled program needs on each core: arguments, results that are not arguments too, temporaries."""
    found = compiled.memory_analysis()
    own = found.output_size_in_bytes - found.alias_size_in_bytes
    return found.argument_size_in_bytes + found.temp_size_in_bytes + own + found.generated_code_size_in_bytes
