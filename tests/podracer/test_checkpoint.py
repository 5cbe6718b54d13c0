"""Checkpoints: everything comes back, only complete ones count, damaged and foreign ones are one sentence."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import mesh
from podracer.checkpoint import Checkpoints
from podracer.errors import UserError
from tests.anakin import tiny


class Everything(NamedTuple):
    """All kinds of leaves that states have."""

    floats: Any
    half: Any
    numbers: Any
    flags: Any
    key: Any
    keys: Any
    nothing: Any = ()


def everything(seed=0):
    key = jax.random.key(seed, impl="rbg")
    return Everything(
        {"a": jax.random.normal(key, (3, 2)), "b.c": [jnp.float32(seed)]},
        jnp.full(4, seed, jnp.bfloat16),
        jnp.arange(seed, seed + 5, dtype=jnp.uint8),
        jnp.asarray([True, False]),
        jax.random.key(seed + 1),
        jax.random.split(key, 8),
    )


@pytest.fixture
def saved(tmp_path):
    """A checkpoint at 7 steps."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(7, {"w": jnp.arange(6.0).reshape(2, 3)}, everything(3), {"score": [1.5, None]})
    yield checkpoints
    checkpoints.close()


def test_all_kinds_of_leaves_come_back_bit_for_bit(saved):
    """Floats, bfloat16, small integers, flags, PRNG keys of two kinds, nested containers, and the meta."""
    tiny.assert_same(saved.state(everything(0)), everything(3))
    assert saved.state(everything(0)).keys.dtype == everything(0).keys.dtype
    params = saved.params({"w": jax.ShapeDtypeStruct((2, 3), jnp.float32)})
    np.testing.assert_array_equal(params["w"], np.arange(6.0).reshape(2, 3))
    assert saved.meta() == {"format": 1, "steps": 7, "score": [1.5, None]}


def test_leaves_go_where_the_example_is(saved):
    """From one device to two and to eight."""
    for cores in (2, 8):
        sharding = mesh.shardings(mesh.make(cores), mesh.SHARDED)
        like = everything(0)._replace(keys=jax.device_put(everything(0).keys, sharding))
        back = saved.state(like).keys
        assert len(back.sharding.device_set) == cores
        tiny.assert_same(back, everything(3).keys)


def test_params_alone_are_a_checkpoint(tmp_path):
    """As the best ones are kept."""
    checkpoints = Checkpoints(tmp_path / "best", 1)
    checkpoints.save(1, {"w": jnp.ones(2)}, (), {})
    checkpoints.save(2, {"w": jnp.zeros(2)}, (), {})
    assert checkpoints.steps() == [2]
    np.testing.assert_array_equal(checkpoints.params({"w": jnp.ones(2)})["w"], np.zeros(2))
    checkpoints.close()


def test_the_newest_stay_and_the_newest_is_meant(tmp_path):
    """Two of four; others that have their own view of the directory see the same."""
    checkpoints = Checkpoints(tmp_path, 2)
    for steps in (90, 100, 110, 1000):
        checkpoints.save(steps, {"w": jnp.full(2, float(steps))}, (), {})
    checkpoints.close()
    other = Checkpoints(tmp_path)
    assert other.steps() == [110, 1000]
    assert other.meta()["steps"] == 1000
    assert other.params({"w": jnp.ones(2)}, 110)["w"][0] == 110
    with pytest.raises(UserError, match=r"no checkpoint at 90 steps.*there are \[110, 1000\]"):
        other.meta(90)
    other.close()


def test_a_checkpoint_can_be_written_again(saved):
    """A run that was killed may come to the same step once more."""
    saved.save(7, {"w": jnp.zeros((2, 3))}, everything(4), {})
    tiny.assert_same(saved.state(everything(0)), everything(4))
    assert saved.steps() == [7]


KILLED = """
import os, pathlib, shutil, signal, sys
import jax.numpy as jnp, numpy as np
import orbax.checkpoint
from podracer.checkpoint import Checkpoints

whole, work = (pathlib.Path(name) for name in sys.argv[1:])

def in_a_child(function, *arguments):
    # A fork is quick, as everything is imported, and safe, as JAX has started nothing in this process.
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(function(*arguments) or 0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def save(operations):
    # Die at the operation on a directory after so many.
    def mortal(function):
        def call(*arguments, **options):
            nonlocal operations
            operations -= 1
            if operations < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)
        return call
    for name in ("mkdir", "rename", "rmdir"):
        setattr(os, name, mortal(getattr(os, name)))
    Checkpoints(work, 1).save(5, {"w": jnp.full(3, 2.0)}, (), {"score": 2})

def read():
    checkpoints = Checkpoints(work, 1)
    assert checkpoints.steps() == [5]
    score = checkpoints.meta()["score"]
    np.testing.assert_array_equal(checkpoints.params({"w": jnp.ones(3)})["w"], np.full(3, score))
    return score

def save_again():
    Checkpoints(work, 1).save(5, {"w": jnp.full(3, 3.0)}, (), {"score": 3})
    assert read() == 3 and [path.name for path in work.iterdir()] == ["5"]

for operations in range(200):
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(whole, work)
    status = in_a_child(save, operations)
    print(status, in_a_child(read), in_a_child(save_again), flush=True)
    if status != -signal.SIGKILL:
        break
"""


def test_replacing_a_checkpoint_leaves_one_wherever_it_is_killed(tmp_path):
    """Killed before each operation on a directory in turn: the old or the new one is read, and the rest cleaned up."""
    checkpoints = Checkpoints(tmp_path / "whole", 1)
    checkpoints.save(5, {"w": jnp.full(3, 1.0)}, (), {"score": 1})
    checkpoints.close()
    command = [sys.executable, "-c", KILLED, str(tmp_path / "whole"), str(tmp_path / "best")]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    rows = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and len(rows) > 10, (done.stdout, done.stderr)
    statuses, scores, again = zip(*rows, strict=True)
    assert statuses == (-signal.SIGKILL,) * (len(rows) - 1) + (0,), done.stderr
    assert list(scores) == sorted(scores) and set(scores) == {1, 2}, (scores, done.stderr)
    assert set(again) == {0}, done.stderr


def test_half_written_checkpoints_do_not_count(saved):
    """A temporary folder of a killed run, an empty one, one whose copy stopped halfway; saving cleans up."""
    directory = saved.directory
    saved.close()
    shutil.copytree(directory / "7", directory / "8")
    shutil.rmtree(directory / "8" / "params")
    (directory / "9").mkdir()
    shutil.copytree(directory / "7", directory / "10.orbax-checkpoint-tmp")
    assert saved.steps() == [7]
    assert saved.meta()["steps"] == 7
    saved.save(9, {"w": jnp.ones((2, 3))}, everything(5), {})
    assert saved.steps() == [7, 9]
    tiny.assert_same(saved.state(everything(0)), everything(5))
    assert not list(directory.glob("*tmp*"))


def test_without_a_checkpoint_the_message_names_the_directory(tmp_path):
    """And nothing is created by asking."""
    with pytest.raises(UserError, match=r"no complete checkpoint in .*nowhere"):
        Checkpoints(tmp_path / "nowhere").meta()
    assert list(tmp_path.iterdir()) == []


def one_line(action):
    """The message of the UserError that `action` raises: one short line with the way out."""
    with pytest.raises(UserError) as caught:
        action()
    text = str(caught.value)
    assert "\n" not in text and len(text) < 600, text
    assert "cannot be read" in text
    return text


@pytest.mark.parametrize(
    "like, says",
    [
        ({"w": jnp.ones((2, 4))}, "w is float32[2, 3]; expected float32[2, 4]."),
        ({"w": jnp.ones((2, 3), jnp.int32)}, "w is float32[2, 3]; expected int32[2, 3]."),
        ({"w": jnp.ones((2, 3)), "v": jnp.ones(1)}, "it has no v."),
        ({"v": jnp.ones((2, 3))}, "it has no v."),
    ],
)
def test_params_of_another_network_are_refused(saved, like, says):
    """Another shape or dtype, a weight more, another name."""
    assert says in one_line(lambda: saved.params(like))


def test_params_with_weights_that_this_network_lacks_are_refused(saved):
    """A layer less must not be restored in part."""
    saved.save(8, {"w": jnp.ones(1), "v": jnp.ones(1)}, (), {})
    assert "it has v, which is not wanted." in one_line(lambda: saved.params({"w": jnp.ones(1)}))


def _damage(path):
    path.write_bytes(path.read_bytes()[:-7] + b"garbage")


@pytest.mark.parametrize("what", ["meta/*", "meta", "params/**/*", "_CHECKPOINT_METADATA", "params/_METADATA"])
def test_damaged_files_are_one_sentence(saved, what):
    """Overwritten or missing parts, in any file."""
    saved.close()
    directory = saved.directory / "7"
    for path in directory.glob(what):
        if path.is_file():
            _damage(path)
        elif what == "meta":
            for file in path.iterdir():
                file.unlink()

    def read():
        saved.meta()
        saved.params({"w": jax.ShapeDtypeStruct((2, 3), jnp.float32)})

    try:
        read()
    except UserError as error:
        assert "\n" not in str(error)
        assert str(saved.directory) in str(error)
    else:
        assert what in ("_CHECKPOINT_METADATA",)  # the items themselves are whole


def test_a_newer_format_is_refused(saved):
    """Rather than misread."""
    saved.close()
    (path,) = [
        p for p in (saved.directory / "7" / "meta").iterdir() if p.read_text()[:1] == "{" and "format" in p.read_text()
    ]
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    assert "format 2" in one_line(saved.meta)
