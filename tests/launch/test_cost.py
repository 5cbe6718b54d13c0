"""Dollars, hours and predictions: against numbers worked out by hand."""

from __future__ import annotations

import csv
import json
import types

import pytest

from launch import cli, cost, predict, rates, scaling_model, slices, training
from podracer.errors import UserError
from tests.launch.bench import bench


def run_directory(path, **content):
    """As `train --run` leaves it, of two cores."""
    path.mkdir()
    facts = {"settings": {}, "num_cores": 2, "devices": "2 cpu cores", "started": "2026-11-29T00:00:00"}
    content = {"recipe": None} | facts | content
    (path / "config.json").write_text(json.dumps(content))
    rows = [
        {"steps": 1000 * n, "frames": 4000 * n, "updates": 10 * n, "steps_per_s": s}
        for n, s in ((1, 5), (2, 90), (3, 110))
    ]
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"steps": 4')
    return path


# Cost


def test_the_papers_muzero_costs_what_is_said_of_it():
    """9 h on 16 cores, two v3-8 of 4 chips: 18 hours of a v3-8, $36.72 at $0.51 per chip, "about $40" in the paper."""
    speed = 200e6 / (9 * 3600)
    assert cost.hours(200e6, speed) == pytest.approx(9.0)
    assert cost.usd(8, 0.51, 200e6, speed) == pytest.approx(36.72)
    # V-trace: one hour of a v3-8.
    assert cost.usd(4, 2.88 / 4, 200e6, 200e6 / 3600) == pytest.approx(2.88)


def test_time_beside_training_is_paid_for_too():
    assert cost.usd(4, 2.0, 3600.0, 1.0, extra_s=1800) == pytest.approx(12.0)


def test_the_table_says_whose_measurement_it_is(capsys):
    line = ["cost", "--steps-per-s", 13889, "--startup-s", 0, "--compile-s", 0]
    assert bench(*line) == 0
    out = capsys.readouterr().out
    assert "your measurement (--steps-per-s); not checked here" in out and "as published" in out
    assert "that it has this speed is not said" in out and "read 2026-11-29" in out
    assert bench(*line, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    mine = found["rows"][-1]
    assert mine["hours"] == pytest.approx(1.0, rel=1e-4) and mine["usd"] == pytest.approx(8.0, rel=1e-4)
    published = {row["what"]: row["usd"] for row in found["rows"] if row["who"] == "paper"}
    assert published == {"Sebulba V-trace, standard batch": 2.88, "Sebulba MuZero": 40.0}
    muzero = next(row for row in found["rows"] if row["what"] == "Sebulba MuZero" and row["who"] == "paper's speed")
    assert muzero["usd"] == pytest.approx(36.72, rel=1e-3)


def test_a_run_tells_its_own_speed(tmp_path, capsys):
    """The median without the first row; frames per step from its rows."""
    path = run_directory(tmp_path / "run")
    assert bench("cost", "--from", path, "--type", "v4-8", "--json") == 0
    found = json.loads(capsys.readouterr().out)["measurement"]
    assert (found["steps_per_s"], found["frame_skip"], found["cores"]) == (100, 4, 2)
    assert found["update_s"] == pytest.approx(100 / 100)
    assert found["source"] == "measured by the run run on 2 cpu cores, 2026-11-29"


def test_a_run_tells_how_often_its_update_sums_gradients(tmp_path, capsys):
    """Epochs times minibatches, those that are not given being the agent's own; many runs at once have no update."""
    path = run_directory(tmp_path / "run")
    content = json.loads((path / "config.json").read_text())
    predict = ["predict", "--from", path, "--params-bytes", "60000", "--out", tmp_path / "x.png"]
    both = {"epochs": 3, "minibatches": 2}
    for agent, changed, sums in (("ppo", {"minibatches": 8}, 32), ("pqn", both, 6), ("a2c", {}, 1)):
        recipe = {"agent": agent, "agent_config": changed}
        (path / "config.json").write_text(json.dumps(content | {"recipe": recipe}))
        assert bench(*predict) == 0
        assert f"with {sums} sum{'s' if sums > 1 else ''} of gradients per update" in capsys.readouterr().out
    assert bench(*predict, "--reduces-per-update", "5") == 0
    assert "with 5 sums of gradients" in capsys.readouterr().out
    (path / "config.json").write_text(json.dumps(content | {"settings": {"seeds": 8}}))
    assert bench(*predict) == 2
    assert "--update-ms is missing, and the measurement does not say it" in capsys.readouterr().err


def test_a_run_that_went_on_elsewhere_tells_the_speed_of_its_last_cores(tmp_path):
    """Eight cores, then two, then four: whose update is of twice the steps. All are those of all hosts."""
    path, rows = run_directory(tmp_path / "run", num_cores=8), []
    for cores, per_update, speeds in ((8, 100, (9, 800, 800)), (2, 100, (9, 200)), (4, 200, (9, 390, 400, 410))):
        for speed in speeds:
            steps, updates = (rows[-1]["steps"], rows[-1]["updates"]) if rows else (0, 0)
            row = {"steps": steps + 10 * per_update, "updates": updates + 10, "steps_per_s": speed}
            rows.append(row | {"frames": row["steps"], "num_cores": cores})
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rate = rates.read(path)
    assert (rate.steps_per_s, rate.cores, rate.update_s) == (400, 4, 200 / 400)
    assert rate.source == "measured by the run run on 2 cpu cores, later 4 cores, 2026-11-29"


def test_a_file_of_bench_tells_its_speed(tmp_path):
    content = {"devices": "2 cpu cores", "num_cores": 2, "steps_per_s": 30, "frame_skip": 4, "update_s": 0.5}
    (tmp_path / "b.json").write_text(json.dumps(content))
    rate = rates.read(tmp_path / "b.json")
    assert (rate.steps_per_s, rate.frame_skip, rate.cores, rate.update_s) == (30, 4, 2, 0.5)


@pytest.mark.slow
def test_this_machine_is_measured_where_nothing_is_given(capsys, monkeypatch):
    monkeypatch.setattr(rates, "BATCH_PER_CORE", 16)
    assert bench("cost", "--seconds", "0.1", "--cores", "2", "--json") == 0
    found = json.loads(capsys.readouterr().out)["measurement"]
    assert found["source"].startswith("measured here and now: a2c on catch, Anakin, 2 cpu")
    assert found["steps_per_s"] > 10 and found["params_bytes"] > 1000


@pytest.mark.parametrize(
    "line, says",
    [
        ("cost --steps-per-s 0", "--steps-per-s is 0"),
        ("cost --steps-per-s nan", "--steps-per-s is nan"),
        ("cost --steps-per-s 5 --from x", "--steps-per-s and --from are both given"),
        ("cost --from nowhere", "--from nowhere does not exist"),
        ("cost --from broken.json", "--from broken.json is not readable JSON"),
        ("cost --from empty.json", "--from empty.json has no steps_per_s above 0"),
        ("cost --steps-per-s 5 --type v3-9", "unknown TPU type 'v3-9'"),
        ("cost --steps-per-s 5 --type tpu7x-8", "the price of tpu7x-8 is not known"),
        ("cost --steps-per-s 5 --region mars", "the price of v3-8 is not known: the table has none in mars"),
        ("cost --steps-per-s 5 --frames 0", "--frames is 0"),
        ("cost --steps-per-s 5 --restarts -1", "--restarts is -1"),
        ("cost --steps-per-s 5 --frame-skip 0", "--frame-skip is 0"),
        ("cost --fro x", "unknown flag --fro. Did you mean '--from'?"),
        ("cost --env envpool/CartPole-v1 --cores 2", "measure it with podracer bench sweep"),
        ("predict", "no measurement; expected --from RUN"),
        ("predict --steps-per-s 5", "--update-ms is missing"),
        ("predict --steps-per-s 5 --update-ms 1", "--params-bytes is missing"),
        ("predict --steps-per-s 5 --update-ms 1 --params-bytes 0", "--params-bytes is 0"),
        (
            "predict --type v2-32 --steps-per-s 5 --update-ms 1 --params-bytes 9",
            "bandwidth between chips of v2 is not known",
        ),
        ("predict --type v4-9", "unknown TPU type 'v4-9'"),
        ("predict --out x.gif", "--out is 'x.gif'"),
        ("predict --steps-per-s 5 --from x", "--steps-per-s and --from are both given"),
        ("predict --from nowhere", "--from nowhere does not exist"),
        ("predict --reduces-per-update 0", "--reduces-per-update is 0"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys, line, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "empty.json").write_text("{}")
    assert bench(*line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in err and err.startswith("podracer: ") and err.count("\n") == 1


def test_frames_per_dollar_of_a_run():
    """At $8 per hour, 10 frames per second are 4,500 frames per dollar."""
    assert cost.PerDollar("v3-8").line(10.0, 4).startswith("4,500 frames (1,125 steps) per dollar, if v3-8 ran at this")
    with pytest.raises(UserError, match="--cost-type tpu7x-8: the table has none"):
        cost.PerDollar("tpu7x-8")


def test_training_says_frames_per_dollar_where_asked(tmp_path, capsys):
    """At its end, by the speed that `bench cost --from` takes; a name that is wrong is refused before it begins."""
    env = types.SimpleNamespace(spec=types.SimpleNamespace(frame_skip=4))
    path = run_directory(tmp_path / "run")
    run = types.SimpleNamespace(steps=1, best_score=None, absolute_score=None, directory=path, env=env)
    training._report(run, cost.PerDollar("v3-8"))
    assert "180,000 frames (45,000 steps) per dollar, if v3-8 ran at this speed ($8.00" in capsys.readouterr().out
    assert bench("cost", "--from", path, "--startup-s", 0, "--compile-s", 0, "--json") == 0
    assert json.loads(capsys.readouterr().out)["rows"][-1]["frames_per_usd"] == pytest.approx(180_000)
    (path / "metrics.jsonl").unlink()
    training._report(run, cost.PerDollar("v3-8"))
    assert "per dollar" not in capsys.readouterr().out
    with pytest.raises(SystemExit) as exit_:
        cli.main(["train", "anakin", "--env", "catch", "--cost-type", "v3-9"])
    assert exit_.value.code == 2 and "unknown TPU type 'v3-9'" in capsys.readouterr().err


# The model


@pytest.mark.parametrize(
    "chips, gb_per_s, milliseconds",
    [
        # 16 MB on v5e 4x4: 2 * 15/16 * 16 MB / 200 GB/s = 0.150 ms, and 8 hops of 1 us.
        ((4, 4), 200, 0.158),
        # 2,048 cores of v3: 2 * 1023/1024 * 16 MB / 160 GB/s = 0.1998 ms, and 64 hops.
        ((32, 32), 160, 0.2638),
        # One ring of four: 2 * 3/4 * 16 MB / 100 GB/s = 0.240 ms, and 4 hops.
        ((4,), 100, 0.244),
        ((2, 2, 1), 300, 0.08 + 0.004),
        ((1, 1), 200, 0.0),
    ],
)
def test_an_all_reduce_by_hand(chips, gb_per_s, milliseconds):
    found = scaling_model.all_reduce_s(16_000_000, chips, gb_per_s * 1e9)
    assert found * 1e3 == pytest.approx(milliseconds, rel=2e-3)


def test_a_ring_is_what_its_steps_add_up_to():
    """Simulated: in each of 2 (n - 1) steps every chip hands P/n bytes to the next one."""
    for n in (2, 5, 16):
        seconds = sum(3e6 / n / 80e9 for _ in range(2 * (n - 1)))
        assert scaling_model.all_reduce_s(3_000_000, (n,), 80e9, hop_s=0.0) == pytest.approx(seconds)


def test_efficiencies_by_hand():
    """16 MB and 20 ms on 16 v5e: 20 / 20.158; on 2,048 v3 cores over 95 % from 6 ms on."""
    v5e, v3 = slices.generations()["v5e"], slices.generations()["v3"]
    small = scaling_model.point(v5e, 16, scaling_model.Measured(1000.0, 0.02, 16_000_000), 200e9)
    assert small.efficiency[0] == pytest.approx(20 / 20.158, rel=1e-4) and small.topology == (4, 4)
    assert small.steps_per_s[0] == pytest.approx(16 * 1000 * 20 / 20.158, rel=1e-4)
    for update_ms, enough in ((6.0, True), (4.0, False)):
        large = scaling_model.point(v3, 2048, scaling_model.Measured(1.0, update_ms / 1e3, 16_000_000), 160e9)
        assert (large.efficiency[0] > 0.95) is enough and large.chips == 1024


def test_the_model_keeps_its_order():
    """Worst <= modelled <= ideal, falling with cores; one core and one chip are perfect; reduces add up."""
    generation = slices.generations()["v3"]
    measured = scaling_model.Measured(100.0, 0.001, 4_000_000)
    points = scaling_model.predict(generation, 2048, measured, 160e9)
    assert [point.cores for point in points] == [1, *(2**k for k in range(3, 12))]
    assert points[0].efficiency == (1.0, 1.0, 1.0)
    modelled = [point.efficiency[0] for point in points]
    assert modelled == sorted(modelled, reverse=True)
    for point in points:
        assert point.efficiency[1] <= point.efficiency[0] <= point.efficiency[2] == 1.0
    twice = scaling_model.point(generation, 64, measured._replace(reduces_per_update=2), 160e9)
    once = scaling_model.point(generation, 64, measured, 160e9)
    assert twice.reduce_s == pytest.approx(2 * once.reduce_s)


def test_the_prediction_is_drawn_with_its_numbers_and_assumptions(tmp_path, capsys):
    out = tmp_path / "p.png"
    line = ["predict", "--type", "v5litepod-16", "--steps-per-s", 1000, "--update-ms", 20, "--params-bytes", 16_000_000]
    assert bench(*line, "--out", out) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{out}, ") and "prediction, not measured: 16 cores of v5e: 63," in said
    assert out.read_bytes().startswith(b"\x89PNG")
    with open(out.with_suffix(".csv"), newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["cores"] for row in rows] == ["1", "4", "8", "16"]
    assert float(rows[-1]["reduce_ms"]) == pytest.approx(0.158, rel=1e-3)
    facts = json.loads(out.with_suffix(".json").read_text())
    assert facts["what"] == predict.TITLE and facts["assumptions"] and facts["published"]
    assert facts["measured"]["source"] == "your measurement of one core"


def test_the_picture_is_titled_dashed_and_holds_the_published_points():
    measured = scaling_model.Measured(1000.0, 0.02, 16_000_000)
    piece = slices.parse("v3-64")
    points = scaling_model.predict(piece.generation, 64, measured, 160e9)
    figure = predict._draw(points, piece, measured, 4, "somebody's", 160.0)
    assert figure.get_suptitle().startswith("prediction, not measured")
    left, right = figure.axes
    styles = {line.get_label(): line.get_linestyle() for line in left.get_lines()}
    assert styles["model, v3"] == "--"
    marks = {(x, y) for line in left.get_lines() if line.get_linestyle() == "None" for x, y in zip(*line.get_data())}
    assert {(8, 55556.0), (8, 200000.0), (2048, 43e6), (16, 6173.0), (128, 4.79e6)} < marks
    efficiency = {
        (x, round(y)) for line in right.get_lines() if line.get_linestyle() == "None" for x, y in zip(*line.get_data())
    }
    assert (2048, 84) in efficiency and (128, 97) in efficiency


def test_a_prediction_from_a_run_takes_a_cores_share(tmp_path):
    """Parameters are counted from its recipe: Catch has 50 squares, the network two layers of 64."""
    recipe = {"env": "catch", "env_options": {}, "agent": "a2c", "agent_config": None, "network": None}
    path = run_directory(tmp_path / "run", recipe=recipe | {"network_config": None})
    options = predict.Options(from_=str(path))
    measured, skip, source = predict._measured(options)
    assert (measured.steps_per_s, skip) == (50.0, 4) and source.endswith("a core's share of 2")
    assert measured.params_bytes % 4 == 0 and measured.params_bytes > 4 * 50 * 64
    _, _, source = predict._measured(predict.Options(from_=str(path), update_ms=3.0))
    assert source.endswith("a core's share of 2; you gave --update-ms")
