"""Pictures: an agent playing, as GIF or MP4."""

from __future__ import annotations

import functools
import itertools
import pathlib
import subprocess
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from podracer.envs.batch import Batch, TimeLimit
from podracer.envs.host import OnHost, is_host, on_host
from podracer.envs.with_state import WithState
from podracer.errors import UserError, check_number
from podracer.types import Agent, TimeStep

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
    frames, ended = [], 0
    for moment in itertools.islice(moments(agent, env, params, seed, drawn=True), max_steps + 1):
        ended += moment.ended
        # The frame of a compiled environment is already the next episode's when the last one has ended.
        if ended < episodes or moment.final:
            frames.append(moment.picture())
        if ended == episodes:
            break
    return frames


class Moment(NamedTuple):
    """What an agent sees in an environment of its own, before it decides."""

    timestep: TimeStep  # [1]
    actor: Any  # the agent's own state, [1, ...]
    key: Any  # of the decision
    picture: Callable[[], np.ndarray]  # uint8 [H, W, 3]
    ended: bool  # an episode has ended with the step that led here
    final: bool  # and its last frame is this one


def moments(agent: Agent, env: Any, params: Any, seed: int, drawn: bool = False) -> Iterator[Moment]:
    """An agent acting greedily, for ever.

    Args:
      agent: who acts.
      env: where; compiled, or on the host.
      params: what the agent acts with.
      seed: of all randomness.
      drawn: whether pictures will be asked for.
    """
    if isinstance(env, OnHost):
        env = env.env
    return (_on_host if is_host(env) else _compiled)(agent, env, params, seed, drawn)


def _compiled(agent: Agent, env: Any, params: Any, seed: int, drawn: bool) -> Iterator[Moment]:
    del drawn
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
    actor, ended = agent.initial_actor_state(1), False
    for number in itertools.count():
        decision = jax.random.fold_in(key, number)
        yield Moment(timestep, actor, decision, functools.partial(_draw, batch.env, state), ended, False)
        actor, state, timestep = step(params, actor, state, timestep, decision)
        ended = bool(timestep.first[0])


def _on_host(agent: Agent, env: Any, params: Any, seed: int, drawn: bool) -> Iterator[Moment]:
    act, key, name = jax.jit(agent.greedy_step or agent.actor_step), jax.random.key(seed), env.spec.name
    batch = env.start_drawn(seed) if drawn else on_host(env, 1).start([seed])
    try:
        step, actor, ended = batch.reset(), agent.initial_actor_state(1), False
        for number in itertools.count():
            decision = jax.random.fold_in(key, number)
            picture = lambda: _picture(name, batch.render())
            yield Moment(step.timestep, actor, decision, picture, ended, ended)
            output, actor = act(params, actor, step.timestep, decision)
            step = batch.step(jax.tree.map(np.asarray, output.action))
            ended = bool(step.game_over[0])
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
