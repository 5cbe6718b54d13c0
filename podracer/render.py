"""Pictures: an agent playing, as GIF or MP4."""

from __future__ import annotations

import pathlib
import subprocess
from typing import Any

import jax
import numpy as np

from podracer.envs.batch import Batch, TimeLimit
from podracer.envs.host import OnHost, is_host
from podracer.envs.with_state import WithState
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


def can_draw(env: Any) -> bool:
    """Whether `play` has a way to draw this environment; a library may still refuse when it is asked."""
    if isinstance(env, OnHost):
        env = env.env
    return hasattr(env, "start_drawn") if is_host(env) else hasattr(_innermost(env), "render")


def play(
    agent: Agent, env: Any, params: Any, episodes: int = 3, max_steps: int = 500, seed: int = 0
) -> list[np.ndarray]:
    """Frames uint8 [H, W, 3] of `episodes` episodes, at most `max_steps` steps in all, the agent acting greedily.

    Of a host environment an episode is a whole game.

    Raises:
      UserError: the environment cannot be drawn, or gives no picture.
    """
    check_number("episodes", episodes, minimum=1)
    check_number("max_steps", max_steps, minimum=1)
    if not can_draw(env):
        how = "start_drawn(seed)" if is_host(env) and not isinstance(env, OnHost) else "render(state)"
        raise UserError(f"{env.spec.name} cannot be drawn; expected an environment with {how}.")
    if isinstance(env, OnHost):
        env = env.env
    play_one = _play_host if is_host(env) else _play_compiled
    return play_one(agent, env, params, episodes, max_steps, seed)


def _play_compiled(agent: Agent, env: Any, params: Any, episodes: int, max_steps: int, seed: int) -> list[np.ndarray]:
    batch = Batch(env.env if isinstance(env, Batch) else env)
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


def _play_host(agent: Agent, env: Any, params: Any, episodes: int, max_steps: int, seed: int) -> list[np.ndarray]:
    act, key, name = jax.jit(agent.greedy_step or agent.actor_step), jax.random.key(seed), env.spec.name
    batch = env.start_drawn(seed)
    try:
        step, actor = batch.reset(), agent.initial_actor_state(1)
        frames, ended = [_picture(name, batch.render())], 0
        for number in range(max_steps):
            output, actor = act(params, actor, step.timestep, jax.random.fold_in(key, number))
            step = batch.step(jax.tree.map(np.asarray, output.action))
            frames.append(_picture(name, batch.render()))
            ended += int(step.game_over[0])
            if ended == episodes:
                break
        return frames
    finally:
        batch.close()


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


def _innermost(env: Any) -> Any:
    """The environment that would draw."""
    while isinstance(env, Batch | TimeLimit | WithState):
        env = env.env
    return env


def _draw(env: Any, state: Any) -> np.ndarray:
    return _picture(env.spec.name, env.render(jax.tree.map(lambda leaf: leaf[0], jax.device_get(state.env))))


def _picture(name: str, image: Any) -> np.ndarray:
    image = np.asarray(image)
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise UserError(f"render of {name} gives {image.dtype}{list(image.shape)}; expected uint8 [height, width, 3].")
    return image
