"""Where rows go: files that a killed run keeps, TensorBoard, a terminal or a pipe, wandb only where it is."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import re
import struct
import subprocess
import sys

import pytest

from podracer import reporting, sinks
from podracer.errors import UserError

ROW = {"steps": 100, "updates": 2, "train_s": 0.5, "steps_per_s": 1234.5, "return_mean": 0.25}


def test_rows_are_lines_of_json_at_once_without_what_is_not_finite(tmp_path):
    """Flushed row by row; NaN and infinities are absent, as JSON has none; a second sink appends."""
    path = tmp_path / "metrics.jsonl"
    sink = sinks.JsonLines(path)
    sink.write(ROW)
    assert json.loads(path.read_text()) == ROW
    sink.write({"steps": 200, "loss": math.nan, "kl": math.inf, "entropy": 0.5, "note": "x"})
    sink.close()
    again = sinks.JsonLines(path)
    again.write({"steps": 300})
    again.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [ROW, {"steps": 200, "entropy": 0.5, "note": "x"}, {"steps": 300}]


def test_rows_after_a_step_are_dropped_and_half_lines_with_them(tmp_path):
    """What a run that goes on would write twice; no file, no fault."""
    path = tmp_path / "metrics.jsonl"
    sinks.drop_rows_after(path, 5)
    assert not path.exists()
    rows = [{"steps": n, "member": m} for n in (1, 2, 3) for m in (0, 1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"steps": 2, "los')
    sinks.drop_rows_after(path, 2)
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows[:4]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def scalars(directory):
    """`(tag, step, value)` of the event files in a directory, read from the format itself: length, crc, record, crc."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(directory.glob("events.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
            at += 16 + length
    return found


def test_tensorboard_files_have_every_number_over_steps(tmp_path):
    """One curve per number; NaN is left out."""
    sink = sinks.TensorBoard(tmp_path)
    sink.write({**ROW, "loss": math.nan})
    sink.write({"steps": 200, "return_mean": 0.75})
    sink.close()
    found = scalars(tmp_path)
    assert [entry for entry in found if entry[0] == "return_mean"] == [
        ("return_mean", 100, 0.25),
        ("return_mean", 200, 0.75),
    ]
    assert {tag for tag, _, _ in found} == {"updates", "train_s", "steps_per_s", "return_mean"}


def test_members_are_curves_of_their_own_in_tensorboard(tmp_path):
    """A folder each."""
    sink = sinks.TensorBoard(tmp_path)
    for member in range(2):
        sink.write({"member": member, "steps": 10, "loss": float(member)})
    sink.close()
    for member in range(2):
        assert scalars(tmp_path / f"member-{member:03d}") == [("loss", 10, float(member))]


def test_without_wandb_the_message_says_how_to_get_it(tmp_path, monkeypatch):
    """Before a run starts as well as from the sink itself."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    for use in (
        lambda: sinks.WeightsAndBiases(tmp_path, {}),
        lambda: reporting.check_sinks(tmp_path, False, True),
    ):
        with pytest.raises(UserError, match=r"wandb is not installed.*pip install '\.\[wandb\]'"):
            use()


def test_wandb_gets_rows_with_steps_and_members_by_name(tmp_path, monkeypatch):
    """A stand-in records the calls."""
    calls = []

    class Wandb:
        def init(self, **arguments):
            calls.append(("init", arguments["name"], arguments["config"]))
            return self

        def log(self, row, step):
            calls.append((row, step))

        def finish(self):
            calls.append("finish")

    monkeypatch.setitem(sys.modules, "wandb", Wandb())
    sink = sinks.WeightsAndBiases(tmp_path / "run", {"seed": 1})
    sink.write({"steps": 5, "loss": 1.0})
    sink.write({"steps": 5, "loss": 2.0, "member": 3})
    sink.close()
    row, member = {"steps": 5, "loss": 1.0}, {"member-003/steps": 5, "member-003/loss": 2.0}
    assert calls == [("init", "run", {"seed": 1}), (row, 5), (member, 5), "finish"]


def piped(monkeypatch):
    text = io.StringIO()
    monkeypatch.setattr(sys, "stderr", text)
    return text


def test_a_pipe_gets_plain_lines_the_first_the_last_and_few_between(monkeypatch):
    """No colours, no carriage returns; evaluations print nothing."""
    text = piped(monkeypatch)
    terminal = sinks.Terminal(1000, "ppo on catch", every_s=3600)
    terminal.note("2 cores")
    for steps in range(100, 1001, 100):
        terminal.write({**ROW, "steps": steps})
        terminal.write({"steps": steps, "eval_return_mean": 1.0})
    terminal.close()
    assert text.getvalue().splitlines() == [
        "2 cores",
        "ppo on catch   10%  100 steps  1.23k steps/s  return 0.25",
        "ppo on catch  100%  1k steps  1.23k steps/s  return 0.25",
    ]


def test_the_time_that_is_left_follows_from_the_speed(monkeypatch):
    """9,000 steps at 100 per second; nothing is said about less than a second."""
    text = piped(monkeypatch)
    terminal = sinks.Terminal(10_000, "x", every_s=0)
    terminal.write({"steps": 1000, "steps_per_s": 100.0})
    terminal.write({"steps": 9950, "steps_per_s": 100.0})
    terminal.close()
    assert text.getvalue().splitlines() == [
        "x   10%  1k steps  100 steps/s  90 s left",
        "x  100%  9.95k steps  100 steps/s",
    ]


def test_many_runs_are_one_line_with_the_mean_of_their_returns(monkeypatch):
    """The last member's row completes it; speed is that of all, so the time left takes all of them into account."""
    text = piped(monkeypatch)
    terminal = sinks.Terminal(1000, "x", members=4, every_s=0)
    for member in range(4):
        terminal.write({"member": member, "steps": 500, "steps_per_s": 200.0, "return_mean": float(member)})
    terminal.close()
    assert text.getvalue() == "x   50%  500 steps  200 steps/s  return 1.50 (mean of 4 runs)  10 s left\n"


def test_a_return_that_is_absent_is_not_shown_as_zero(monkeypatch):
    """Before the first episode has ended."""
    text = piped(monkeypatch)
    terminal = sinks.Terminal(1000, "x")
    terminal.write({"steps": 10, "steps_per_s": 1e6})
    terminal.close()
    assert "return" not in text.getvalue()


LIVE = """
import sys
from podracer.sinks import Terminal
terminal = Terminal(1000, "ppo on catch")
terminal.note("2 cores [x] stay")
for steps in range(100, 1001, 100):
    terminal.write({"steps": steps, "steps_per_s": 1234.0, "return_mean": 0.25})
terminal.close()
"""


def test_a_terminal_gets_a_live_bar():
    """In a pseudo-terminal: one bar that is redrawn up to 100 %, and notes that stay, brackets and all."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "PYTHONPATH": os.getcwd()}
    process = subprocess.Popen([sys.executable, "-c", LIVE], stderr=theirs, stdout=theirs, env=environment)
    os.close(theirs)
    seen = b""
    while True:
        try:
            chunk = os.read(ours, 4096)
        except OSError:  # Linux says so where the other side is closed
            break
        if not chunk:
            break
        seen += chunk
    os.close(ours)
    assert process.wait(30) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode())
    assert "2 cores [x] stay" in text
    assert "━" in text
    last = [line for line in re.split(r"[\r\n]+", text) if "ppo on catch" in line][-1]
    assert "100%" in last and "return 0.25" in last and "1k steps" in last


def test_an_alarm_is_given_once():
    said = []
    alarms = sinks.Alarms({"clipped": (0.05, "raise it"), "broken": (0.0, "mend it")}, said.append)
    for row in ({"steps": 1}, {"clipped": 0.05, "broken": 0.0}, {"clipped": 0.06}, {"clipped": 1.0}, {"broken": 1e-3}):
        alarms.write(row)
    assert said == ["podracer: raise it", "podracer: mend it"]
    alarms.close()
