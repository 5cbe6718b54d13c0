"""Checkpoints: everything comes back, only whole ones count, damaged and foreign ones are one sentence."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import manifest, mesh
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
    assert saved.meta() == {"format": 2, "steps": 7, "score": [1.5, None]}


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
    for name in ("mkdir", "rename", "replace", "rmdir", "unlink"):
        setattr(os, name, mortal(getattr(os, name)))
    checkpoints = Checkpoints(work, 1)
    checkpoints.save(5, {"w": jnp.full(3, 2.0)}, (), {"score": 2})
    checkpoints.close()

def read():
    checkpoints = Checkpoints(work, 1)
    assert checkpoints.steps() == [5]
    score = checkpoints.meta()["score"]
    np.testing.assert_array_equal(checkpoints.params({"w": jnp.ones(3)})["w"], np.full(3, score))
    return score

def read_and_save_again():
    before = read()
    checkpoints = Checkpoints(work, 1)
    checkpoints.save(5, {"w": jnp.full(3, 3.0)}, (), {"score": 3})
    checkpoints.close()
    assert read() == 3 and len(list(work.iterdir())) == 1
    return before

for operations in range(200):
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(whole, work)
    status = in_a_child(save, operations)
    print(status, in_a_child(read_and_save_again), flush=True)
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
    statuses, scores = zip(*rows, strict=True)
    assert statuses == (-signal.SIGKILL,) * (len(rows) - 1) + (0,), done.stderr
    assert list(scores) == sorted(scores) and set(scores) == {1, 2}, (scores, done.stderr)


def test_half_written_checkpoints_do_not_count(saved):
    """A temporary folder of a killed run, an empty one, one whose copy stopped halfway; saving cleans up."""
    directory = saved.directory
    saved.close()
    shutil.copytree(directory / "7", directory / "8")
    shutil.rmtree(directory / "8" / "params")
    (directory / "9").mkdir()
    shutil.copytree(directory / "7", directory / "10.orbax-checkpoint-tmp")
    assert saved.steps() == [7]
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


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two checkpoints, of 7 and 8 steps, to be copied and damaged."""
    directory = tmp_path_factory.mktemp("two") / "checkpoints"
    checkpoints = Checkpoints(directory, run="mine")
    for steps in (7, 8):
        checkpoints.save(steps, {"w": jnp.arange(6.0) + steps}, {"s": jnp.arange(3), "k": jax.random.key(steps)}, {})
    checkpoints.close()
    return directory


@pytest.fixture
def copy(two, tmp_path):
    return pathlib.Path(shutil.copytree(two, tmp_path / "checkpoints"))


LIKE = {"params": {"w": jnp.zeros(6)}, "state": {"s": jnp.zeros(3, int), "k": jax.random.key(0)}}


def read(directory, run="mine", like=LIKE):
    """What `resume` does: the steps of the checkpoint that was read, compared with what was written."""
    checkpoints = Checkpoints(directory, run=run)
    meta, _ = checkpoints.choose(lambda meta: (None, like))
    np.testing.assert_array_equal(checkpoints.params(like["params"])["w"], np.arange(6.0) + meta["steps"])
    tiny.assert_same(checkpoints.state(like["state"])["k"], jax.random.key(meta["steps"]))
    return meta["steps"]


def test_whatever_is_altered_is_named_and_the_one_before_is_read(two, tmp_path, capsys):
    """A bit, the last byte, everything, the whole file: of every file, the manifest too."""
    assert read(two) == 8
    assert capsys.readouterr().err == ""
    files = [path.relative_to(two / "8") for path in sorted((two / "8").rglob("*")) if path.is_file()]
    files.remove(pathlib.Path("commit_success.txt"))  # which Orbax adds at the end, and nobody reads
    assert len(files) > 15
    rng = np.random.default_rng(0)
    for number, file in enumerate(files):
        kind = ("bit", "short", "empty", "missing")[number % 4]
        directory = shutil.copytree(two, tmp_path / str(number))
        path = directory / "8" / file
        content = bytearray(path.read_bytes())
        content[rng.integers(len(content))] ^= 1 << rng.integers(8)
        new = {"bit": bytes(content), "short": path.read_bytes()[:-1], "empty": b""}
        path.unlink() if kind == "missing" else path.write_bytes(new[kind])
        assert read(directory) == 7, (file, kind)
        (line,) = capsys.readouterr().err.splitlines()
        assert "warning" in line and f"{directory / '8'} cannot be read: {file}" in line, line
        assert f"going on with {directory / '7'}" in line, line


@pytest.mark.parametrize("what", ["name", "run", "dtype", "shape"])
def test_a_checkpoint_that_is_another_ones_is_named_and_the_one_before_is_read(copy, capsys, what):
    """Renamed, from another run, with another dtype, of another network; all whole in themselves."""
    if what == "name":
        (copy / "8").rename(copy / "9")
    else:
        shutil.rmtree(copy / "8")
        other = Checkpoints(copy.parent / "other", run="other" if what == "run" else "mine")
        w = {"dtype": jnp.arange(6), "shape": jnp.arange(7.0), "run": jnp.arange(6.0)}[what]
        other.save(8, {"w": w}, {"s": jnp.arange(3), "k": jax.random.key(8)}, {})
        other.close()
        (copy.parent / "other" / "8").rename(copy / "8")
    says = {
        "name": "its manifest says that it is of 8 steps",
        "run": "it belongs to another run",
        "dtype": "w is int32[6]; expected float32[6]",
        "shape": "w is float32[7]; expected float32[6]",
    }
    assert read(copy) == 7
    (line,) = capsys.readouterr().err.splitlines()
    assert says[what] in line and f"going on with {copy / '7'}" in line


def test_where_none_is_whole_or_fits_the_newest_is_named(copy):
    """And what to do."""
    text = one_line(lambda: read(copy, like={"params": {"w": jnp.zeros(5)}}))
    assert f"{copy / '8'} cannot be read: w is float32[6]; expected float32[5]" in text and "Nor can the 1" in text
    for steps in ("7", "8"):
        (copy / steps / "state" / "_METADATA").unlink()
    assert "state/_METADATA is missing" in one_line(lambda: read(copy))
    assert "restore it from a copy" in one_line(lambda: Checkpoints(copy).meta(7))
    assert Checkpoints(copy).steps() == []


def test_what_claims_to_be_newer_goes_when_the_run_went_back_and_saved_again(copy, capsys):
    """It is of a time that did not happen; and a damaged one must not push out the good ones."""
    (copy / "8" / "params" / "_METADATA").write_text("x")
    checkpoints = Checkpoints(copy, run="mine")
    assert checkpoints.meta()["steps"] == 7
    checkpoints.save(7, LIKE["params"], LIKE["state"], {})
    checkpoints.close()
    assert checkpoints.steps() == [7] and checkpoints.names() == ["7-1"]
    assert "8 cannot be read: params/_METADATA has 1 bytes, not " in capsys.readouterr().err


def test_a_newer_format_is_refused(copy):
    """Rather than misread."""
    shutil.rmtree(copy / "7")
    path = copy / "8" / "manifest.json"
    content = json.loads(path.read_text())["content"]
    path.write_text(manifest._dump({**content, "format": 3}))
    assert "format 3" in one_line(Checkpoints(copy).meta)


def test_a_checkpoint_from_before_there_were_manifests_is_read_with_a_warning(tmp_path, capsys):
    """A run of an older version goes on; its first own checkpoint has a manifest."""
    import orbax.checkpoint as ocp

    handlers = {name: ocp.StandardCheckpointHandler() for name in ("params", "state")}
    manager = ocp.CheckpointManager(tmp_path, item_handlers=handlers | {"meta": ocp.JsonCheckpointHandler()})
    items = {name: ocp.args.StandardSave({"w": jnp.arange(6.0)}) for name in ("params", "state")}
    meta = ocp.args.JsonSave({"format": 1, "steps": 5, "x": 2})
    manager.save(5, args=ocp.args.Composite(meta=meta, **items))
    manager.close()
    checkpoints = Checkpoints(tmp_path, run="mine")
    assert checkpoints.meta() == {"format": 1, "steps": 5, "x": 2}
    assert "written without hashes" in capsys.readouterr().err
    np.testing.assert_array_equal(checkpoints.params({"w": jnp.zeros(6)})["w"], np.arange(6.0))
    assert "expected float32[5]" in one_line(lambda: checkpoints.params({"w": jnp.zeros(5)}))
    checkpoints.save(6, {"w": jnp.zeros(6)}, (), {})
    checkpoints.close()
    assert checkpoints.steps() == [5, 6]


# In the background


def test_training_goes_on_while_files_are_written_and_donates_what_was_saved(tmp_path, monkeypatch):
    """The files hold what was there when `save` was called, although its buffers were given away."""
    go_on, original = threading.Event(), manifest.write

    def slow(*arguments):
        assert go_on.wait(60)
        original(*arguments)

    monkeypatch.setattr(manifest, "write", slow)
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    tree = {"w": jax.device_put(jnp.arange(1e6), mesh.shardings(mesh.make(8), mesh.SHARDED))}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, tree, (), {})
    for _ in range(3):
        tree = step(tree)
        checkpoints.poll()
    assert not (tmp_path / "1").exists()
    go_on.set()
    np.testing.assert_array_equal(checkpoints.params(tree)["w"], np.arange(1e6, dtype=np.float32))
    checkpoints.close()


@pytest.mark.parametrize("when", ["poll", "save", "wait", "close"])
def test_what_goes_wrong_in_the_background_is_raised_and_leaves_nothing_behind(two, tmp_path, monkeypatch, when):
    """At the next occasion, whichever it is; the one before is still there, and the next one can be written."""
    directory = pathlib.Path(shutil.copytree(two, tmp_path / "x"))
    checkpoints, failed = Checkpoints(directory), threading.Event()

    def fails(*_):
        failed.set()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "write", fails)
        checkpoints.save(9, {"w": jnp.ones(6)}, (), {})
        assert failed.wait(60)
        deadline = time.monotonic() + 60
        with pytest.raises(OSError, match="No space left"):
            while time.monotonic() < deadline:
                checkpoints.save(10, {"w": jnp.ones(6)}, (), {}) if when == "save" else getattr(checkpoints, when)()
    assert sorted(path.name for path in directory.iterdir()) == ["7", "8"]
    checkpoints.save(10, {"w": jnp.ones(6)}, (), {})
    checkpoints.close()
    assert checkpoints.steps() == [8, 10]


def test_what_would_not_fit_on_the_disk_is_not_begun(tmp_path, monkeypatch):
    """The others on that disk need the rest."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 10**6))
    with pytest.raises(OSError, match="No space left on device: a checkpoint needs 1,048,600 bytes, 1,000,000 are"):
        Checkpoints(tmp_path).save(1, {"w": jnp.ones(6)}, (), {})
