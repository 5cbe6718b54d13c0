"""`podracer bench`: the numbers beside the picture, and one line for every mistake."""

from __future__ import annotations

import csv
import json

import pytest

from launch import cli
from podracer.runs import PACKAGES
from sebulba import measure
from sebulba.loop import Lag, Sebulba
from sebulba.topology import split
from tests.sebulba.scripted import OPEN, Scripted

TINY = ["--cores", "2", "--seconds", "0.05", "--rounds", "3"]


def bench(*arguments):
    try:
        cli.main(["bench", *map(str, arguments)])
    except SystemExit as exit_:
        return exit_.code or 0
    return 0


@pytest.mark.slow
def test_bench_sebulba_writes_a_picture_and_its_numbers(tmp_path, capsys):
    """A row for every batch size and unroll length, one per batch size for the environments alone."""
    out = tmp_path / "figure.png"
    sizes = ["--batch-sizes", "8,4", "--unroll-lengths", "2,3", "--network", "mlp"]
    assert bench("sebulba", "--env", "envpool/CartPole-v1", *sizes, *TINY, "--out", out) == 0
    assert capsys.readouterr().out == f"{out}, {out.with_suffix('.csv')}, {out.with_suffix('.json')}\n"
    assert out.read_bytes().startswith(b"\x89PNG")
    with open(out.with_suffix(".csv"), newline="") as file:
        rows = list(csv.DictReader(file))
    shapes = [(row["what"], row["batch_size"], row["unroll_length"]) for row in rows]
    expected = [("training", size, length) for length in "23" for size in "48"]
    assert shapes == expected + [("environments alone", size, "") for size in "48"]
    for row in rows:
        low, median, high = (float(row[f"steps_per_s_{name}"]) for name in ("low", "median", "high"))
        assert 0 < low <= median <= high
        assert float(row["frames_per_s_median"]) == median  # CartPole skips no frames
        assert row["rounds"] == "3"
    facts = json.loads(out.with_suffix(".json").read_text())
    assert set(PACKAGES) < set(facts["versions"])
    assert (facts["num_cores"], facts["settings"]["batch_sizes"]) == (2, "8,4")


@pytest.mark.parametrize(
    "line, says",
    [
        ("sebulbo", "unknown figure 'sebulbo'. Did you mean 'sebulba'?"),
        ("sebulba --env cach", "unknown environment 'cach'. Did you mean 'catch'?"),
        ("sebulba --env catch --env.row 3", "catch has no option 'row'"),
        ("sebulba --agent impal", "unknown agent 'impal'. Did you mean 'impala'?"),
        ("sebulba --network natur", "unknown network 'natur'. Did you mean 'nature'?"),
        ("sebulba --batch-sizes 16,x", "--batch-sizes is '16,x'; expected whole numbers >= 1"),
        ("sebulba --batch-sizes 0", "--batch-sizes is '0'"),
        ("sebulba --unroll-lengths 20,", "--unroll-lengths is '20,'"),
        ("sebulba --seconds 0", "--seconds is 0"),
        ("sebulba --rounds 0", "--rounds is 0"),
        ("sebulba --lag late", "lag is 'late'"),
        ("sebulba --out x.gif", "--out is 'x.gif'"),
        ("sebulba --out nowhere/x.png", "the folder nowhere does not exist"),
        ("sebulba --batch-size 3", "unknown flag --batch-size. Did you mean '--batch-sizes'?"),
        ("sebulba --env catch --cores 2 --actor-cores 2", "actor_cores is 2 of 2 cores"),
        ("sebulba --env catch --cores 4 --batch-sizes 8,4", "batch_size = 4 does not divide into learner cores = 3"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys, line, says):
    monkeypatch.chdir(tmp_path)
    assert bench(*line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in err and err.startswith("podracer: ") and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_bench_alone_lists_its_figures(capsys):
    assert bench() == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: podracer bench {") and "  sebulba " in out


def make_loop(delay_s=0.0, lag=Lag(1, True)):
    from podracer import agents, networks

    env = Scripted(batch_size=8, delay_s=delay_s)
    return Sebulba(agents.a2c(env.spec, network=networks.mlp((8,))), env, split(2, 1, 2, 8), 4, lag)


def test_speed_is_counted_over_whole_updates_after_the_first_ones():
    """Environments that sleep say how fast it can be: 8 steps per thread and sleep."""
    loop = make_loop(delay_s=0.02)
    loop.compile()
    found = measure.training(loop, 0.5)
    assert found.updates >= 2 and found.done.steps == found.updates * loop.steps_per_update
    assert loop.learner.updates == found.updates + loop.lag.updates + 1
    assert found.done.seconds >= 0.5
    limit = 2 * 8 / 0.02
    assert 0.3 * limit < found.done.steps_per_s <= limit * 1.05
    assert 0.3 * limit < measure.ceiling(loop.env, 2, 0.5).steps_per_s <= limit
    assert measure.training(loop, 0.1).updates >= 1  # another run of the same loop
    assert not OPEN


def test_blocks_go_on_from_one_another_until_told_to_stop():
    seen = []
    loop = make_loop()
    measure.blocks(loop, 0.05, lambda block: bool(seen.append(block)) or len(seen) < 4)
    assert seen[0] is None and len(seen) == 4
    assert loop.learner.updates == 2 + sum(block.updates for block in seen[1:])
    assert set(seen[1].waits) >= {"environment", "inference", "queue_get", "learner_step"}


def test_parts_alone_leave_the_environments_closed():
    loop = make_loop()
    for part, steps in ((measure.Inference(loop), 8), (measure.Learning(loop), loop.steps_per_update)):
        done = part(0.05)
        assert done.steps > 0 and done.steps % steps == 0 and done.seconds >= 0.05
    assert not OPEN
    measure.training(loop, 0.05)  # the params that the parts took are not the learner's own
