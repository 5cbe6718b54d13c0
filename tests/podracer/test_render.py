"""Pictures of agents at play: files that other programs read, with the frames that were played."""

from __future__ import annotations

import dataclasses
import subprocess

import imageio.v2 as imageio
import imageio_ffmpeg
import jax
import numpy as np
import pytest

from podracer import envs, render
from podracer.errors import UserError
from podracer.types import ActorOutput, Agent
from tests.envs.scripted import Scripted


def playing(env, **arguments):
    """Frames of an agent that plays at random."""

    def sampled(params, state, timestep, key):
        return ActorOutput(jax.random.randint(key, (1,), 0, env.spec.action.num_values)), state

    agent = Agent(lambda key: None, lambda size: (), sampled, lambda *_: None)
    return render.play(agent, env, (), **arguments)


ENVS = {
    "catch": envs.Catch(rows=5, columns=4),
    "gridworld": envs.GridWorld(size=7, max_steps=8),
    "cartpole": envs.CartPole(max_steps=6),
    "cartpole-masked": envs.CartPole(max_steps=6, mask_velocity=True),
    "memory-chain": envs.MemoryChain(length=3),
    "time-limit": envs.TimeLimit(envs.Catch(rows=9), 3),
}


@pytest.mark.parametrize("name", list(ENVS))
def test_every_environment_of_our_own_draws_and_its_pictures_change(name):
    """uint8 [H, W, 3], all of one size, not all the same."""
    frames = playing(ENVS[name], episodes=1)
    assert all(frame.dtype == np.uint8 and frame.shape == frames[0].shape for frame in frames)
    assert frames[0].ndim == 3 and frames[0].shape[2] == 3
    assert any((frame != frames[0]).any() for frame in frames)


@pytest.mark.parametrize("episodes", [1, 2, 3])
def test_catch_is_drawn_from_the_first_observation_to_the_last_episode(episodes):
    """Episodes of 4 steps; same-step resets show the next start in place of the final state."""
    assert len(playing(envs.Catch(rows=5), episodes=episodes)) == 4 * episodes


def test_in_next_step_mode_final_states_are_drawn_too():
    """An episode of exactly 3 steps has 4 pictures."""
    frames = playing(envs.TimeLimit(envs.Catch(rows=9), 3), episodes=2)
    assert len(frames) == 2 * 4


def test_no_more_than_max_steps_are_played():
    """However long the episodes."""
    assert len(playing(envs.Catch(), episodes=100, max_steps=7)) == 8


def test_the_seed_decides_the_episodes():
    """The same pictures for the same seed, others for another."""
    one, same, other = (np.stack(playing(envs.Catch(), episodes=2, seed=seed)) for seed in (0, 0, 3))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()


def test_games_on_the_host_are_drawn_as_they_draw_themselves():
    """Scripted episodes of 3, 1 and 5 steps: a picture per step and per reset, whose colour is the step's number."""
    pytest.importorskip("gymnasium")
    env = envs.make("gymnasium/tests.envs.scripted_gymnasium:PodracerScripted-v0")
    frames = playing(env, episodes=3, seed=5)
    assert [int(frame[0, 0, 0]) for frame in frames] == [0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 4, 5]
    assert len(playing(env, episodes=3, max_steps=4)) == 5


def test_atari_is_drawn_in_colour():
    pytest.importorskip("envpool")
    frames = playing(envs.make("atari/Pong"), max_steps=30)
    assert len(frames) == 31 and {frame.shape for frame in frames} == {(210, 160, 3)}
    assert any((frame != frames[0]).any() for frame in frames) and (frames[0][..., 0] != frames[0][..., 2]).any()


def test_a_compiled_environment_on_the_host_is_drawn_as_by_itself():
    one, other = (playing(env, episodes=2) for env in (envs.on_host(envs.Catch(), 3), envs.Catch()))
    np.testing.assert_array_equal(np.stack(one), np.stack(other))


def test_what_can_be_drawn_is_known_before():
    drawn = [envs.Catch(), envs.Batch(envs.Catch()), envs.on_host(envs.Catch()), envs.make("gymnasium/CartPole-v1")]
    assert all(render.can_draw(env) for env in [*drawn, envs.TimeLimit(envs.Catch(), 3)])
    assert not render.can_draw(Scripted()) and not render.can_draw(envs.on_host(Scripted()))

    class Bare:
        spec, batch_size = envs.Catch().spec, 3

        def start(self, seeds): ...

    with pytest.raises(UserError, match=r"catch cannot be drawn; expected an environment with start_drawn\(seed\)"):
        playing(Bare())


def frames_of(height, width, number=7):
    return [np.full((height, width, 3), 30 * n, np.uint8) for n in range(number)]


def test_a_gif_has_the_frames_and_their_speed(tmp_path):
    """Read back by another call; 10 per second are 100 ms each."""
    path = tmp_path / "play.gif"
    render.write(path, frames_of(24, 36), 10.0)
    back = imageio.mimread(path)
    assert len(back) == 7
    assert back[0].shape[:2] == (24, 36)
    np.testing.assert_allclose([frame[..., 0].mean() for frame in back], [30 * n for n in range(7)], atol=2)
    with imageio.get_reader(path) as reader:
        assert reader.get_meta_data()["duration"] == pytest.approx(100)


@pytest.mark.parametrize("height, width", [(64, 96), (65, 97)])
def test_an_mp4_has_the_frames_at_even_sizes(tmp_path, height, width):
    """H.264 takes even sizes only; odd pictures grow by one line, small ones stay whole."""
    path = tmp_path / "play.mp4"
    render.write(path, frames_of(height, width), 10.0)
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    done = subprocess.run(command, capture_output=True, check=True)
    height, width = height + height % 2, width + width % 2
    assert f"{width}x{height}" in done.stderr.decode() and "10 fps" in done.stderr.decode()
    back = np.frombuffer(done.stdout, np.uint8).reshape(-1, height, width, 3)
    np.testing.assert_allclose(back.mean((1, 2, 3)), [30 * n for n in range(7)], atol=12)


def test_an_environment_without_pictures_is_refused():
    """Also behind a time limit, which has a `render` of its own."""
    for env in (Scripted(), envs.TimeLimit(Scripted(), 3)):
        with pytest.raises(UserError, match="scripted cannot be drawn"):
            playing(env)


@pytest.mark.parametrize("name", ["play.avi", "play", "missing/play.gif"])
def test_files_that_cannot_be_written_are_refused_before_anything_is_played(tmp_path, name):
    """Another ending, none, a folder that is not there."""
    with pytest.raises(UserError, match="--out is"):
        render.check_out(tmp_path / name)


def test_pictures_that_are_not_pictures_are_named():
    """A user's `render` that gives a grey picture."""

    @dataclasses.dataclass(frozen=True)
    class Grey(envs.Catch):
        def render(self, state):
            return np.zeros((5, 5))

    with pytest.raises(UserError, match=r"render .* gives float64\[5, 5\]; expected uint8 \[height, width, 3\]"):
        playing(Grey())
