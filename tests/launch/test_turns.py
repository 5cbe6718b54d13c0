"""Workers that take turns: who runs when, what is left over, and what a worker that fails looks like."""

from __future__ import annotations

import os
import sys

import pytest

from launch import turns
from launch.turns import Failed, Measured

# Says when each block began in a common file, so that the order of all can be read from it.
WORKER = """
import json, os, sys
name, log, steps, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
print(json.dumps({"ready": True, "compile_s": 0.5, "config": {}}), flush=True)
for line in sys.stdin:
    word, _, what = line.strip().partition(" ")
    if word == "quit":
        break
    if what == "die":
        sys.exit(3)
    with open(log, "a") as file:
        print(name, what, file=file)
    numbers = {"steps": steps, "seconds": seconds, "steps_per_s": steps / seconds, "cpu_seconds": seconds / 2}
    print(json.dumps(numbers), flush=True)
"""


def command(name, log, steps=100, seconds=2.0):
    return [sys.executable, "-c", WORKER, name, str(log), str(steps), str(seconds)]


@pytest.mark.parametrize("freeze", [False, True])
def test_workers_take_turns_and_are_gone_at_the_end(tmp_path, freeze):
    log, said = tmp_path / "order", []
    commands = {name: command(name, log) for name in "ab"}
    found = turns.in_turns(commands, 3, tmp_path / "logs", freeze=freeze, say=said.append)
    assert log.read_text().split() == ["a", "b"] * 3
    for row in found.values():
        assert isinstance(row, Measured)
        assert (row.steps_per_s, row.cpu_per_million, row.cores, row.compile_s) == (50, 10_000, 0.5, 0.5)
        assert len(row.blocks) == 3
    assert said == ["starting 1 of 2: a", "starting 2 of 2: b", "round 1 of 3", "round 2 of 3", "round 3 of 3"]


def test_parts_of_a_worker_are_rows_and_some_are_seldom(tmp_path):
    log = tmp_path / "order"
    parts = {"a": ("env/1", "learn/1")}
    found = turns.in_turns({"a": command("a", log)}, 3, tmp_path / "logs", parts, seldom="learn/")
    assert log.read_text().splitlines() == ["a env/1", "a learn/1", "a env/1", "a env/1", "a learn/1"]
    assert [len(row.blocks) for row in found.values()] == [3, 2] and list(found) == ["env/1", "learn/1"]


def test_processes_that_work_together_answer_as_one(tmp_path):
    """All steps are counted by each; the slowest says how long it took; CPU time adds up."""
    team = [command("a", tmp_path / "order", 100, 2.0), command("b", tmp_path / "order", 100, 4.0)]
    found = turns.in_turns({"both": team}, 2, tmp_path / "logs")["both"]
    assert (found.steps_per_s, found.blocks[0]["cpu_seconds"], found.blocks[0]["seconds"]) == (25, 3, 4)
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["both.1.log", "both.log"]


def test_where_one_of_several_dies_the_others_are_ended(tmp_path):
    good, bad = command("a", tmp_path / "order"), [sys.executable, "-c", "raise SystemExit(7)"]
    worker = turns.Worker("both", [good, bad], tmp_path / "logs")
    assert worker.error == f"ended with status 7, see {tmp_path / 'logs' / 'both.1.log'}"
    worker.block()
    worker.stop()
    assert isinstance(worker.result(), Failed)
    for process in worker._processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


def test_a_worker_that_dies_between_its_turns_fails_alone(tmp_path):
    log = tmp_path / "order"
    parts = {"a": ("", "die"), "b": ("ok",)}
    found = turns.in_turns({"a": command("a", log), "b": command("b", log)}, 2, tmp_path / "logs", parts)
    assert isinstance(found["a"], Failed) and "status 3" in found["a"].reason
    assert isinstance(found["ok"], Measured) and len(found["ok"].blocks) == 2


def test_one_at_a_time_makes_a_new_process_for_every_block(tmp_path):
    log = tmp_path / "order"
    commands = {"a": command("a", log), "b": command("b", log), "c": [sys.executable, "-c", "raise SystemExit(1)"]}
    found = turns.one_at_a_time(commands, 2, tmp_path / "logs")
    assert log.read_text().split() == ["a", "b", "a", "b"]
    assert len(found["a"].blocks) == 2 and isinstance(found["c"], Failed)
    assert sorted(path.name for path in (tmp_path / "logs" / "2").iterdir()) == ["a.log", "b.log", "c.log"]


def test_where_one_of_several_dies_nobody_waits_for_the_others(tmp_path):
    """One that would never answer, because it waits for the dead one, is ended too."""
    waits = [sys.executable, "-c", "import time; time.sleep(3600)"]
    worker = turns.Worker("both", [waits, [sys.executable, "-c", "raise SystemExit(7)"]], tmp_path / "logs")
    assert worker.error == f"ended with status 7, see {tmp_path / 'logs' / 'both.1.log'}"
    worker.stop()
    assert [process.poll() for process in worker._processes] == [-9, 7]
