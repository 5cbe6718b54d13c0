"""Environments whose observation carries their state, for agents that plan with the environment itself."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from podracer import specs
from podracer.envs import adapting, api
from podracer.envs.batch import Batch, TimeLimit
from podracer.envs.host import OnHost, is_host
from podracer.errors import UserError


@dataclasses.dataclass(frozen=True)
class WithState:
    """`env`, whose observation is {"observation": [...], "action_mask": ... where there is one, STATE: leaves}.

    The state is a tuple of its leaves, typed PRNG keys as their numbers, so that it passes through anything that an
    observation passes through: resets (after one it is the new episode's), the host, other devices. The spec's `model`
    is this environment, which makes states of such tuples again and steps them.

    Args:
      env: an environment that can be compiled.

    Raises:
      UserError: it runs on the host.
    """

    env: Any

    def __post_init__(self):
        if is_host(self.env):
            raise UserError(
                f"{self.env.spec.name} runs on the host; expected an environment that can be compiled, as its state is "
                "planned with. Choose muzero or gumbel-muzero, which learn a model."
            )

    @functools.cached_property
    def spec(self) -> api.Spec:
        state, _ = jax.eval_shape(self.env.reset, jax.random.key(0))
        inner = self.env.spec
        observation = _beside(inner.observation, adapting.array_spec(jax.eval_shape(_leaves, state)))
        return dataclasses.replace(inner, observation=observation, model=self)

    @property
    def evaluation(self) -> WithState:
        """What it is measured in: see `for_evaluation`."""
        return WithState(for_evaluation(self.env))

    def reset(self, key):
        state, observation = self.env.reset(key)
        return state, _beside(observation, _leaves(state))

    def step(self, state, action, key):
        state, out = self.env.step(state, action, key)
        out = api.Step(*out)
        return state, out._replace(observation=_beside(out.observation, _leaves(state)))

    def state_of(self, observation: Any) -> Any:
        """The state [...] that an observation of one environment carries."""
        structure, kinds = self._structure
        return jax.tree.unflatten(
            structure, [_typed(*each) for each in zip(observation[specs.STATE], kinds, strict=True)]
        )

    @functools.cached_property
    def _structure(self) -> tuple[Any, list]:
        """How states are built, and of each leaf that is a typed key which generator's it is."""
        found = []

        def look(key):
            leaves, structure = jax.tree.flatten(self.env.reset(key)[0])
            found.extend((structure, [jax.random.key_impl(leaf) if _is_key(leaf) else None for leaf in leaves]))
            return ()

        jax.eval_shape(look, jax.random.key(0))
        return found[0], found[1]

    def render(self, state):
        return self.env.render(state)


def with_state(env: Any) -> WithState:
    """`env` as agents that plan with it want it: with its state; board games in self-play by default."""
    if isinstance(env, WithState):
        return env
    own = getattr(env, "self_play", None)
    return WithState(env if own is None else own)


def for_evaluation(env: Any) -> Any:
    """What agents trained in `env` are measured in: another one where the return in `env` says nothing.

    In self-play one of the players always wins. An environment says what to measure in by a property `evaluation`.
    """
    if isinstance(env, Batch | OnHost | TimeLimit):
        return dataclasses.replace(env, env=for_evaluation(env.env))
    return getattr(env, "evaluation", env)


def _beside(observation: Any, state: Any) -> dict[str, Any]:
    named = observation if isinstance(observation, dict) else {"observation": observation}
    return {**named, specs.STATE: state}


def _leaves(state: Any) -> tuple:
    return tuple(jax.random.key_data(leaf) if _is_key(leaf) else leaf for leaf in jax.tree.leaves(state))


def _typed(leaf: Any, generator: Any) -> Any:
    return leaf if generator is None else jax.random.wrap_key_data(leaf, impl=generator)


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
