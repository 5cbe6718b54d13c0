"""Pictures: an agent playing, as GIF or MP4."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import numpy as np

from podracer.envs.batch import Batch
from podracer.errors import UserError, check_number
from podracer.types import Agent

FORMATS = (".gif", ".mp4")


def check_out(path: pathlib.Path) -> None:
    """Refuse a file name that no picture can be written to.

    Raises:
      UserError: the ending is not .gif or .mp4, or the folder is missing.
    """
    if path.suffix not in FORMATS:
        raise UserError(f"--out is '{path}'; expected a name ending in {' or '.join(FORMATS)}.")
    if not path.parent.is_dir():
        raise UserError(f"--out is '{path}', but the folder {path.parent} does not exist. Create it first.")


def play(
    agent: Agent, env: Any, params: Any, episodes: int = 3, max_steps: int = 500, seed: int = 0
) -> list[np.ndarray]:
    """Frames uint8 [H, W, 3] of `episodes` episodes, at most `max_steps` steps in all, the agent acting greedily.

    Raises:
      UserError: the environment has no `render`.
    """
    check_number("episodes", episodes, minimum=1)
    check_number("max_steps", max_steps, minimum=1)
    batch = Batch(env.env if isinstance(env, Batch) else env)
    if not hasattr(batch.env, "render"):
        raise UserError(f"{batch.spec.name} cannot be drawn; expected an environment with render(state).")
    act = agent.greedy_step or agent.actor_step

    @jax.jit
    def step(params, actor, state, timestep, key):
        act_key, env_key = jax.random.split(key)
        output, actor = act(params, actor, timestep, act_key)
        state, timestep = batch.step(state, output.action, env_key[None])
        return actor, state, timestep

    key = jax.random.key(seed)
    state, timestep = jax.jit(batch.init)(key[None])
    actor = agent.initial_actor_state(1)
    frames, ended = [_draw(batch.env, state)], 0
    for number in range(max_steps):
        actor, state, timestep = step(params, actor, state, timestep, jax.random.fold_in(key, number))
        ended += int(timestep.first[0])
        if ended == episodes:
            break
        frames.append(_draw(batch.env, state))
    return frames


def write(path: pathlib.Path, frames: list[np.ndarray], frames_per_s: float = 30.0) -> None:
    """Write frames as GIF or MP4, by the ending of `path`."""
    import imageio.v2 as imageio

    check_out(path)
    if path.suffix == ".gif":
        imageio.mimsave(path, frames, duration=1000.0 / frames_per_s, loop=0)
    else:
        # H.264 takes even sizes only.
        even = [np.pad(f, ((0, f.shape[0] % 2), (0, f.shape[1] % 2), (0, 0)), mode="edge") for f in frames]
        imageio.mimsave(path, even, fps=frames_per_s, macro_block_size=1)


def _draw(env: Any, state: Any) -> np.ndarray:
    return np.asarray(env.render(jax.tree.map(lambda leaf: leaf[0], jax.device_get(state.env))), np.uint8)
