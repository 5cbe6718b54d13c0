"""Saving during a run: when it is due, that failures are loud and survivable, and that they end the run in time."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import anakin
from podracer import checkpoint, claim, manifest, saving, sinks
from podracer.claim import Claim
from podracer.errors import NotSaved, UserError
from podracer.interruption import Interruption
from podracer.saving import Saver
from podracer.settings import RunSettings
from tests.anakin import tiny


@dataclasses.dataclass
class Run:
    """What a Saver asks of a run."""

    directory: pathlib.Path | None
    settings: RunSettings = RunSettings()
    steps: int = 0


class Time:
    """A clock that is set by hand."""

    now = 1000.0

    def __call__(self):
        return self.now


def saver(directory, time=None, **settings):
    if directory is not None:
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps({"settings": {}, "recipe": None, "id": "x"}))
    return Saver(Run(directory, RunSettings(**settings)), time or Time())  # type: ignore


def save(saver, steps):
    saver._run.steps = steps
    saver.save(steps, {"w": jnp.full(3, float(steps))}, (), {})


def saves(saver, time, seconds, numbers):
    """The numbers after which it saved, each of which took so many seconds."""
    found = []
    for number in numbers:
        time.now += seconds
        if saver.due(number):
            found.append(number)
            save(saver, number)
    return found


def test_a_save_is_due_by_the_clock(tmp_path):
    """About each minute, with calls of a second; also where they become slower; with slow ones, after each."""
    time = Time()
    with saver(tmp_path / "run", time, checkpoint_every_s=60) as one:
        first = saves(one, time, 1.0, range(1, 401))
        assert len(first) == 6 and all(58 <= gap <= 63 for gap in np.diff([0, *first])), first
        slower = saves(one, time, 10.0, range(401, 501))
        assert 12 <= len(slower) <= 17 and max(np.diff(slower)) <= 7, slower
        assert len(saves(one, time, 100.0, range(501, 511))) >= 9


class Nothing:
    """Checkpoints that cost nothing."""

    def save(self, *_):
        pass

    poll = wait = close = save


def test_hosts_are_asked_a_few_times_per_interval(tmp_path, monkeypatch):
    """What is told is the first host's word: here it is asked how often, over ten minutes of calls of 10 ms."""
    time, asked = Time(), []
    with saver(tmp_path / "run", time, checkpoint_every_s=60) as one:
        monkeypatch.setattr(saving.hosts, "from_first", lambda name, value: asked.append(1) or value)
        monkeypatch.setattr(
            one, "save", lambda *_: setattr(one, "_since", time.now) or setattr(one, "_at", one._number)
        )
        assert 9 <= len(saves(one, time, 0.01, range(1, 60_000))) <= 10
    assert len(asked) < 80, len(asked)


def test_other_saves_put_off_the_next_one_and_none_is_due_where_none_is_wanted(tmp_path):
    """After an evaluation, say; with 0 seconds only those are left."""
    time = Time()
    with saver(tmp_path / "run", time, checkpoint_every_s=60) as one:
        assert saves(one, time, 1.0, range(1, 51)) == []
        save(one, 50)
        assert 105 <= saves(one, time, 1.0, range(51, 150))[0] <= 112
    with saver(tmp_path / "other", time, checkpoint_every_s=0) as one:
        assert saves(one, time, 1000.0, range(1, 51)) == []
    with saver(None, time) as one:
        assert saves(one, time, 1000.0, range(1, 51)) == []


def fails(*_):
    raise OSError(28, "No space left on device")


class Unreachable:
    """In place of the file system of a bucket whose network is gone: whatever is asked of it fails, each time anew."""

    asked = 0

    def fail(self, *_, **__):
        self.asked += 1
        raise ConnectionError(f"request {self.asked} of {os.urandom(4).hex()}: Cannot connect to host storage")

    def patch(self, patch):
        from etils import epath

        for name in ("exists", "is_dir", "iterdir", "mkdir", "open", "write_text"):
            patch.setattr(type(epath.Path("/")), name, self.fail)


def full_disk(patch):
    patch.setattr(manifest, "write", fails)


FAILURES = pytest.mark.parametrize(
    ("breaks", "reason"), [(full_disk, "No space left on device"), (Unreachable().patch, "Cannot connect to host")]
)


@FAILURES
def test_what_cannot_be_written_is_said_and_training_goes_on(tmp_path, monkeypatch, capsys, breaks, reason):
    """At length once, then at the 2nd, 4th, 8th time; when there is room again, all is well."""
    time = Time()
    with saver(tmp_path / "run", time, checkpoint_every_s=60) as one:
        save(one, 10)
        one._checkpoints.wait()
        with monkeypatch.context() as patch:
            breaks(patch)
            assert len(saves(one, time, 60.0, range(11, 21))) == 10
            one._settle(one._checkpoints.wait)
        assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["10"]
        assert saves(one, time, 60.0, [21]) == [21]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4, lines
    assert "could not be written: " in lines[0] and reason in lines[0]
    assert ". Training goes on until the last good" in lines[0]
    assert f"is of 10 steps: podracer resume {tmp_path / 'run'}" in lines[0]
    assert ["2 times" in lines[1], "4 times" in lines[2], "8 times" in lines[3]] == [True] * 3
    assert saving.open_checkpoints(tmp_path / "run").steps() == [10, 21]


@FAILURES
@pytest.mark.parametrize("every_s", [60, 0])
def test_the_run_ends_when_the_last_good_one_is_too_old(tmp_path, monkeypatch, every_s, breaks, reason):
    """Half an hour here; the message says what is left."""
    time, settings = Time(), {"checkpoint_every_s": every_s, "checkpoint_max_age_s": 1800}
    one = saver(tmp_path / "run", time, **settings)
    with (
        pytest.raises(NotSaved, match=rf"for 1,800 s \(.*{reason}.*\)\. The last good one is of 10 steps"),
        one,
    ):
        one.due(9)
        save(one, 10)
        one._checkpoints.wait()
        breaks(monkeypatch)
        save(one, 11)
        one._settle(one._checkpoints.wait)
        for number in range(11, 100):
            time.now += 60.0
            if one.due(number):
                save(one, number)
            assert time.now < 1000 + 1800 + 70
    assert time.now > 1000 + 1800


def test_a_last_checkpoint_that_fails_is_a_failure_of_the_run(tmp_path, monkeypatch):
    """Not silently the one before."""
    one = saver(tmp_path / "run")
    with (
        pytest.raises(NotSaved, match=r"the last checkpoint of .*run, at 11 steps, could not be written: No space"),
        one,
    ):
        save(one, 10)
        one._checkpoints.wait()
        monkeypatch.setattr(manifest, "write", fails)
        save(one, 11)


def test_an_error_of_the_run_is_not_hidden_by_one_of_saving(tmp_path, monkeypatch, capsys):
    """The checkpoint is a warning then."""
    monkeypatch.setattr(manifest, "write", fails)
    with pytest.raises(ZeroDivisionError), saver(tmp_path / "run") as one:
        save(one, 10)
        raise ZeroDivisionError
    assert "No space left" in capsys.readouterr().err


def test_echoes_of_a_failed_write_are_left_out_and_other_errors_are_not(tmp_path, monkeypatch):
    """TensorStore reports to a loop that is gone, by way of either hook."""
    seen, echo, other = [], RuntimeError("Event loop is closed"), ValueError("mine")
    monkeypatch.setattr(sys, "excepthook", lambda *arguments: seen.append(arguments[1]))
    monkeypatch.setattr(sys, "unraisablehook", lambda found: seen.append(found.exc_value))
    before = sys.excepthook, sys.unraisablehook
    with saver(tmp_path / "run"):
        for error in (echo, other):
            sys.excepthook(type(error), error, None)
            sys.unraisablehook(types.SimpleNamespace(exc_value=error))
    assert seen == [other, other] and (sys.excepthook, sys.unraisablehook) == before


# A whole run


def train(directory, sink=(), **changes):
    env = tiny.catch()
    settings = {**tiny.SIZES, "evaluations": 1, "total_steps": 480, **changes}
    return anakin.train(tiny.a2c(env), env, cores=2, run_dir=directory, sinks=sink, **settings)


@dataclasses.dataclass
class Leaving:
    """A sink that ends the run, as a kill would, at its first row after so many steps."""

    steps: int

    def write(self, row: dict[str, Any]):
        if row["steps"] >= self.steps:
            raise ZeroDivisionError

    def close(self):
        pass


def test_saved_at_any_moment_the_run_goes_on_bit_for_bit(tmp_path, monkeypatch):
    """Due after each call; stopped after each in turn."""
    straight = train(tmp_path / "straight")
    monkeypatch.setattr(Saver, "_plan", lambda *_: (True, 1))
    whole = train(tmp_path / "whole", keep=9)
    tiny.assert_same(whole.state, straight.state)
    assert saving.open_checkpoints(tmp_path / "whole").steps() == [80, 160, 240, 320, 400, 480]
    for steps in (160, 320):
        directory = tmp_path / str(steps)
        with pytest.raises(ZeroDivisionError):
            train(directory, [Leaving(steps)])
        run = anakin.resume(directory, cores=2, sinks=[])
        tiny.assert_same(run.state, straight.state)
        tiny.assert_same(run.best_params, straight.best_params)


def test_checkpoints_may_be_elsewhere(tmp_path):
    """`checkpoint_dir`; evaluation and resume find them."""
    run = train(tmp_path / "run", checkpoint_dir=str(tmp_path / "elsewhere"), total_steps=160)
    assert not (tmp_path / "run" / "checkpoints").exists() and not (tmp_path / "run" / "best").exists()
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == ["best", "checkpoints"]
    again = anakin.resume(tmp_path / "run", cores=2, total_steps=240, sinks=[])
    assert again.steps == 240 and again.best_steps is not None and run.steps == 160


def test_a_place_for_checkpoints_belongs_to_one_run(tmp_path):
    """Or the second would delete those of the first; and one that cannot be reached is refused at once."""
    train(tmp_path / "one", checkpoint_dir=str(tmp_path / "place"), total_steps=80, evaluations=0)
    for place, says in (
        (tmp_path / "place", "holds checkpoints of another run"),
        ("nowhere://x", "begins with nowhere://"),
    ):
        with pytest.raises(UserError, match=says):
            train(tmp_path / f"two-{says[:5]}", checkpoint_dir=str(place), total_steps=80, evaluations=0)
    assert saving.open_checkpoints(tmp_path / "one").steps() == [80]


def test_a_bucket_needs_its_library(tmp_path, monkeypatch):
    """Which is asked for before anything is compiled or written."""
    monkeypatch.setattr(checkpoint.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"checkpoint_dir gs://bucket/run is a bucket.*pip install '\.\[gcs\]'"):
        train(tmp_path / "run", checkpoint_dir="gs://bucket/run")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(checkpoint.importlib.util, "find_spec", lambda name: name == "gcsfs" or None)
    assert str(checkpoint.place("gs://bucket/run")) == "gs://bucket/run"


def test_a_run_whose_best_params_are_damaged_goes_on(tmp_path, capsys):
    """They are chosen anew."""
    train(tmp_path / "run", total_steps=160)
    (tmp_path / "run" / "best" / "160" / "params" / "_METADATA").unlink()
    assert anakin.resume(tmp_path / "run", cores=2, total_steps=240, sinks=[]).best_steps == 240
    assert "params/_METADATA is missing" in capsys.readouterr().err


# One run per directory


def test_a_second_run_is_refused_while_the_first_one_lives(tmp_path):
    """Also in the same process; afterwards the directory is free."""
    train(tmp_path / "run", total_steps=80)
    held = Claim(tmp_path / "run")
    with pytest.raises(UserError, match=rf"run directory .* is in use by process {os.getpid()} on .* Stop that run"):
        anakin.resume(tmp_path / "run", cores=2, total_steps=160, sinks=[])
    held.release()
    assert anakin.resume(tmp_path / "run", cores=2, total_steps=160, sinks=[]).steps == 160


KILLED = """
import os, pathlib, signal, sys
from podracer.claim import Claim
claim = Claim(pathlib.Path(sys.argv[1]))
print("holds", flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("what", ["data", "manifest"])
def test_a_run_whose_checkpoints_cannot_be_read_is_not_begun_anew(tmp_path, what):
    """By the command that launchers repeat: it says what is damaged, and touches nothing; mended, it goes on."""
    directory = tmp_path / "run"
    train(directory, total_steps=80)
    (folder,) = [path for path in (directory / "checkpoints").iterdir() if path.is_dir()]
    files = sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    damaged = folder / manifest.NAME if what == "manifest" else files[-1]
    good, rows = damaged.read_bytes(), (directory / "metrics.jsonl").read_bytes()
    config = (directory / "config.json").read_bytes()
    damaged.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(UserError, match=r"checkpoint .*80 cannot be read"):
        train(directory, total_steps=160, or_resume=True)
    assert (directory / "metrics.jsonl").read_bytes() == rows and (directory / "config.json").read_bytes() == config
    damaged.write_bytes(good)
    assert train(directory, total_steps=160, or_resume=True).steps == 160


def test_a_run_that_was_killed_before_its_last_score_makes_up_for_it(tmp_path):
    """It is finished only with the row of its best params; another end is named by who stops before it."""
    directory = tmp_path / "run"
    train(directory, total_steps=80)
    path = directory / "metrics.jsonl"
    rows = path.read_text().splitlines(keepends=True)
    assert [row for row in rows if "absolute_" in row] == rows[-1:]
    with pytest.raises(UserError, match="is finished: it has 80 of 80 steps"):
        anakin.resume(directory, cores=2, sinks=[])
    path.write_text("".join(rows[:-1]))
    assert anakin.resume(directory, cores=2, sinks=[]).absolute_score is not None
    assert [row for row in path.read_text().splitlines(keepends=True) if "absolute_" in row] == rows[-1:]
    with pytest.raises(UserError, match="is finished"):
        anakin.resume(directory, cores=2, sinks=[])


def test_who_stops_before_another_end_than_the_first_says_how_to_go_on_to_it(tmp_path):
    train(tmp_path / "run", total_steps=80)
    for total_steps, flag in ((80, ""), (160, " --total-steps 160")):
        interruption = Interruption()
        interruption.signal = signal.SIGINT
        with pytest.raises(KeyboardInterrupt) as error:
            interruption.leave(tmp_path / "run", 40, total_steps)
        assert str(error.value) == f"stopped at 40 steps; go on with: podracer resume {tmp_path}/run{flag}"


def test_a_killed_run_stands_in_nobodys_way(tmp_path):
    """Whatever it left in the file."""
    line = [sys.executable, "-c", KILLED, str(tmp_path)]
    process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "holds\n"
    with pytest.raises(UserError, match=f"in use by process {process.pid} on "):
        Claim(tmp_path)
    process.communicate("now\n", timeout=60)
    assert json.loads((tmp_path / "lock").read_text())["pid"] == process.pid
    Claim(tmp_path).release()
    assert (tmp_path / "lock").read_text() == ""


@pytest.mark.parametrize(
    ("holder", "age_s", "goes_on", "waits"),
    [
        ({"host": "elsewhere", "pid": 1}, 10, True, True),
        ({"host": "elsewhere", "pid": 1}, 10, False, True),
        ({"host": "elsewhere", "pid": 1}, 1000, False, False),
        ({"pid": 1}, 10, True, True),
        ("garbage", 10, False, False),
    ],
)
def test_another_machines_run_is_waited_for(tmp_path, monkeypatch, capsys, holder, age_s, goes_on, waits):
    """Where the file system's locks hold for one machine only: it may have died, or say that it goes on."""
    path, waited = tmp_path / "lock", []
    path.write_text(holder if isinstance(holder, str) else json.dumps(holder))
    os.utime(path, (time.time() - age_s,) * 2)
    now = time.time()

    def sleep(seconds):
        waited.append(seconds)
        if goes_on and sum(waited) > 20:
            os.utime(path)

    monkeypatch.setattr(claim.time, "sleep", sleep)
    monkeypatch.setattr(claim.time, "time", lambda: now + sum(waited))
    if goes_on:
        with pytest.raises(UserError, match="in use by process 1 on"):
            Claim(tmp_path)
        assert sum(waited) < 30
    else:
        Claim(tmp_path).release()
        assert sum(waited) == pytest.approx(290 if waits else 0, abs=1)
    assert ("waiting for 290 s to see whether that one is gone" in capsys.readouterr().err) == waits


def test_without_locks_the_number_of_the_process_decides(tmp_path, monkeypatch):
    """As some network file systems have none: alive, gone, and of another start of this machine."""
    monkeypatch.setattr(claim, "_lock", lambda file: None)
    for holder, free in (({"pid": os.getppid()}, False), ({"pid": 2**22 + 1}, True), ({"boot": "x"}, True)):
        (tmp_path / "lock").write_text(json.dumps({**claim._me(), "pid": os.getppid(), **holder}))
        if free:
            Claim(tmp_path).release()
        else:
            with pytest.raises(UserError, match="in use by process"):
                Claim(tmp_path)


# Rows


def test_rows_that_cannot_be_written_are_counted_and_leave_no_half_lines(tmp_path, capsys):
    """A real limit on the size of files, in the middle of the third row."""
    code = f"""
import pathlib, resource, signal
from podracer.sinks import JsonLines
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
rows = JsonLines(pathlib.Path({str(tmp_path / "metrics.jsonl")!r}))
for steps in range(10):
    if steps == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40, resource.RLIM_INFINITY))
    if steps == 8:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    rows.write({{"steps": steps, "x": 1}})
rows.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line)["steps"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert found == [0, 1, 8, 9], (found, done.stderr)
    assert "1 row of" in done.stderr and "training goes on" in done.stderr and "6 rows of" in done.stderr


def test_rows_from_after_a_checkpoint_are_cut_off_in_place(tmp_path):
    """Also half a line, and where there is no room for a copy."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"steps": 1}\n{"steps": 2}\n{"steps": 3}\n{"st')
    inode = path.stat().st_ino
    sinks.drop_rows_after(path, 2)
    assert path.read_text() == '{"steps": 1}\n{"steps": 2}\n' and path.stat().st_ino == inode
    path.write_text('{"steps": 3}\n{"steps": 2}\n')
    sinks.drop_rows_after(path, 2)
    assert path.read_text() == '{"steps": 2}\n'
    shutil.rmtree(tmp_path)
    sinks.drop_rows_after(path, 2)


def test_one_of_several_hosts_that_cannot_begin_to_write_ends(tmp_path, monkeypatch):
    """The others have begun, and would wait for it for minutes; by itself it would go on with a warning."""

    class Refusing:
        def save(self, *_, **__):
            raise PermissionError("Permission denied")

    monkeypatch.setattr(checkpoint.Checkpoints, "_open_writer", lambda self: Refusing())
    monkeypatch.setattr(checkpoint.Checkpoints, "_first_says", lambda self, ask: "10")
    one = checkpoint.Checkpoints(tmp_path / "checkpoints")
    with pytest.raises(PermissionError):
        one.save(10, np.zeros(3), (), {})
    monkeypatch.setattr(checkpoint.hosts, "count", lambda: 2)
    with pytest.raises(checkpoint.OneHostFailed, match="checkpoints/10: PermissionError: Permission denied"):
        one.save(10, np.zeros(3), (), {})
    monkeypatch.setattr(checkpoint.hosts, "count", lambda: 1)
    with saver(tmp_path / "run", Time()) as several:

        def fails(*_):
            raise checkpoint.OneHostFailed("as above")

        monkeypatch.setattr(several._checkpoints, "save", fails)
        with pytest.raises(checkpoint.OneHostFailed):
            several.save(10, np.zeros(3), (), {})
