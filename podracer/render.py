"""Pictures: an agent playing, as GIF or MP4."""

from __future__ import annotations

import pathlib
import subprocess
from typing import Any

import jax
import numpy as np

from podracer.envs.batch import Batch, TimeLimit
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
      UserError: the environment has no `render`, or it gives no picture.
    """
    check_number("episodes", episodes, minimum=1)
    check_number("max_steps", max_steps, minimum=1)
    batch = Batch(env.env if isinstance(env, Batch) else env)
    inner = batch.env
    while isinstance(inner, TimeLimit):
        inner = inner.env
    if not hasattr(inner, "render"):
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
    """Write frames [H, W, 3] uint8 as GIF or MP4, by the ending of `path`.

    Raises:
      UserError: the file cannot be written.
    """
    check_out(path)
    if path.suffix == ".mp4":
        _write_mp4(path, frames, frames_per_s)
        return
    import imageio.v2 as imageio

    try:
        imageio.mimsave(path, frames, duration=1000.0 / frames_per_s, loop=0)  # type: ignore
    except OSError as error:
        raise UserError(f"--out {path} cannot be written: {error.strerror}. Choose another --out.") from error


def _write_mp4(path: pathlib.Path, frames: list[np.ndarray], frames_per_s: float) -> None:
    """Through ffmpeg's standard input: imageio's own writer forks, which may hang a process that runs JAX."""
    import imageio_ffmpeg

    # H.264 takes even sizes only.
    even = [np.pad(f, ((0, f.shape[0] % 2), (0, f.shape[1] % 2), (0, 0)), mode="edge") for f in frames]
    height, width = even[0].shape[:2]
    source = f"-f rawvideo -pix_fmt rgb24 -s {width}x{height} -r {frames_per_s} -i -".split()
    target = ["-c:v", "libx264", "-pix_fmt", "yuv420p", str(path)]
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-loglevel", "error", *source, *target]
    done = subprocess.run(command, input=b"".join(f.tobytes() for f in even), capture_output=True)
    if done.returncode:
        reason = " ".join(done.stderr.decode(errors="replace").split())[-200:]
        raise UserError(f"--out {path} cannot be written: ffmpeg says {reason}. Choose another --out.")


def _draw(env: Any, state: Any) -> np.ndarray:
    image = np.asarray(env.render(jax.tree.map(lambda leaf: leaf[0], jax.device_get(state.env))))
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise UserError(
            f"render of {env.spec.name} gives {image.dtype}{list(image.shape)}; expected uint8 [height, width, 3]."
        )
    return image
