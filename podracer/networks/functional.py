"""From an NNX module to pure functions: split once, then only parameters travel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx

from podracer.errors import UserError


class Functional(NamedTuple):
    """A module without its parameters."""

    module: Any  # the module with abstract parameters; static attributes can be asked
    init: Callable[[jax.Array], Any]  # (key) -> params, nested dicts of arrays
    apply: Callable[..., Any]  # (params, function, *args) -> function(module, *args)


def functional(build: Callable[[nnx.Rngs], nnx.Module]) -> Functional:
    """Pure functions of the module that `build(rngs)` makes. Building is only traced here, nothing is computed.

    Raises:
      UserError: the module keeps state besides its parameters (dropout, batch statistics).
    """
    abstract = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    graph, _params, _ = nnx.split(abstract, nnx.Param, ...)
    only_parameters(abstract)

    def init(key):
        return nnx.to_pure_dict(nnx.state(build(nnx.Rngs(key)), nnx.Param))

    def apply(pure_params, function, *args):
        state = nnx.split(abstract, nnx.Param, ...)[1]
        nnx.replace_by_pure_dict(state, pure_params)
        return function(nnx.merge(graph, state), *args)

    return Functional(abstract, init, apply)


def only_parameters(module: nnx.Module) -> None:
    """Refuse a module with other state; a trunk is asked before it is called, as calling it would change that state.

    Raises:
      UserError: the module keeps state besides its parameters.
    """
    rest = nnx.split(module, nnx.Param, ...)[2]
    kinds = sorted({type(leaf).__name__ for leaf in jax.tree.leaves(rest, is_leaf=_is_variable)})
    if kinds:
        raise UserError(
            f"network {type(module).__name__} keeps {', '.join(kinds)}; expected parameters (nnx.Param) only. "
            "Use LayerNorm instead of BatchNorm, and no dropout."
        )


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)
