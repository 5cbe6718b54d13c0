"""An environment whose episodes have chosen lengths and ends, and a plain numpy account of what a batch must give."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer.envs import api


class State(NamedTuple):
    start: jax.Array  # [] float32, drawn at reset: tells episodes apart
    script: jax.Array  # [] int32, which line of the script this episode follows
    steps: jax.Array  # [] int32


@dataclasses.dataclass(frozen=True)
class Scripted:
    """Line i of the script is (length, truncated). A reset draws a line; observation: [start, script, steps].

    The reward of step k is `start + 10 * k + action`.
    """

    script: tuple[tuple[int, bool], ...] = ((3, False), (1, True), (5, True), (1, False), (2, False))
    truncates: bool = True

    @property
    def spec(self) -> api.Spec:
        return api.Spec("scripted", api.Array((3,)), api.Discrete(4), self.truncates)

    def reset(self, key):
        start_key, script_key = jax.random.split(key)
        start = jax.random.uniform(start_key)
        script = jax.random.randint(script_key, (), 0, len(self.script))
        state = State(start, script, jnp.zeros((), jnp.int32))
        return state, self._observe(state)

    def step(self, state, action, key):
        state = state._replace(steps=state.steps + 1)
        length, cut = jnp.asarray([line[0] for line in self.script]), jnp.asarray([line[1] for line in self.script])
        over = state.steps >= length[state.script]
        reward = state.start + 10.0 * state.steps + action
        return state, api.Step(self._observe(state), reward, over & ~cut[state.script], over & cut[state.script])

    def _observe(self, state):
        return jnp.stack([state.start, state.script.astype(jnp.float32), state.steps.astype(jnp.float32)])


def reference(env: Any, next_step: bool, keys: np.ndarray, actions: np.ndarray) -> dict[str, np.ndarray]:
    """What a batch of `Scripted` must give: a loop over environments and steps, in numpy.

    Only the draws of `env.reset` are taken from the environment; every end, reward and flag is worked out here.

    Args:
      keys: [T + 1, B] keys; those of step t start an episode after being folded with 1.
      actions: [T, B].

    Returns:
      observation [T + 1, B, 3], reward, discount, first, valid [T + 1, B].
    """
    unroll, batch = actions.shape
    first_starts, later_starts = _starts(env, keys)
    out = {
        "observation": np.zeros((unroll + 1, batch, 3), np.float32),
        "reward": np.zeros((unroll + 1, batch), np.float32),
        "discount": np.ones((unroll + 1, batch), np.float32),
        "first": np.zeros((unroll + 1, batch), bool),
        "valid": np.zeros((unroll + 1, batch), bool),
    }
    for b in range(batch):
        start, line, steps = first_starts[0, b]
        out["observation"][0, b] = start, line, 0
        out["first"][0, b] = True
        over = False
        for t in range(1, unroll + 1):
            first = False
            if over and next_step:
                first, over = True, False
            else:
                steps += 1
                length, cut = env.script[int(line)]
                over = steps >= length
                out["reward"][t, b] = start + 10 * steps + actions[t - 1, b]
                out["discount"][t, b] = 0.0 if over and not cut else 1.0
                out["valid"][t, b] = True
                if over and not next_step:
                    first, over = True, False
            if first:
                start, line, steps = later_starts[t, b]
            out["first"][t, b] = first
            out["observation"][t, b] = start, line, steps
    return out


@functools.partial(jax.jit, static_argnums=0)
def _draw(env, keys):
    observe = jax.vmap(jax.vmap(lambda key: env.reset(key)[1]))
    return observe(keys), observe(jax.vmap(jax.vmap(lambda key: jax.random.fold_in(key, 1)))(keys))


def _starts(env, keys):
    """First observations [T + 1, B, 3] of episodes that start from the keys, and from the keys folded with 1."""
    return tuple(np.asarray(seen) for seen in _draw(env, keys))
