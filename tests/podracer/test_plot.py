"""Learning curves: who shares a line, the band around it, and what is said about what cannot be drawn."""

from __future__ import annotations

import json

import numpy as np
import pytest

from podracer import plot
from podracer.errors import UserError

RECIPE = {
    "env": "catch",
    "env_options": {},
    "agent": "ppo",
    "agent_config": {"learning_rate": 1e-3},
    "network": "mlp",
    "network_config": {"hidden": [64]},
}


def run_directory(folder, name, rows, recipe=RECIPE, **settings):
    directory = folder / name
    directory.mkdir()
    settings = {"seed": 0, "seeds": 1, "sweep": [], "total_steps": 100, **settings}
    (directory / "config.json").write_text(json.dumps({"recipe": recipe, "settings": settings, "num_cores": 2}))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def rows_of(*values, **fields):
    return [{"steps": 10 * n, "return_mean": value, **fields} for n, value in enumerate(values, 1)]


def groups(*directories):
    curves = [curve for directory in directories for curve in plot.read_curves(directory, "return_mean", "steps")]
    return {name: len(members) for name, members in plot.label(curves).items()}


def test_runs_that_differ_only_in_their_seed_are_one_line(tmp_path):
    """Length, evaluations and files do not matter either."""
    one = run_directory(tmp_path, "one", rows_of(0, 1), seed=0, keep=2)
    two = run_directory(tmp_path, "two", rows_of(0, 1), seed=1, total_steps=500, keep=9, evaluations=3)
    assert groups(one, two) == {"ppo on catch": 2}


def test_runs_with_other_settings_are_lines_of_their_own_named_by_what_differs(tmp_path):
    """A learning rate, a batch size; and another agent, whose settings are not compared with theirs."""
    one = run_directory(tmp_path, "one", rows_of(0, 1), batch_per_core=8)
    two = run_directory(
        tmp_path, "two", rows_of(0, 1), {**RECIPE, "agent_config": {"learning_rate": 0.5}}, batch_per_core=8
    )
    three = run_directory(tmp_path, "three", rows_of(0, 1), batch_per_core=16)
    four = run_directory(tmp_path, "four", rows_of(0, 1), {**RECIPE, "agent": "pqn", "agent_config": {"zeta": 1}})
    assert groups(one, two, three, four) == {
        "ppo on catch, batch_per_core=8, learning_rate=0.001": 1,
        "ppo on catch, batch_per_core=8, learning_rate=0.5": 1,
        "ppo on catch, batch_per_core=16, learning_rate=0.001": 1,
        "pqn on catch": 1,
    }


def test_runs_of_python_objects_go_by_their_directories(tmp_path):
    """They have no recipe."""
    one = run_directory(tmp_path, "one", rows_of(0, 1), None)
    two = run_directory(tmp_path, "two", rows_of(0, 1), None)
    assert groups(one, two) == {"one": 1, "two": 1}


def test_members_of_a_sweep_are_grouped_by_setting_with_their_seeds_together(tmp_path):
    """Two rates times two entropies times three seeds, in the order in which they were trained."""
    rows = [row for member in range(12) for row in rows_of(member, member, member=member)]
    sweep = ["learning_rate=1e-2,1e-3", "entropy-cost=0,0.5"]
    directory = run_directory(tmp_path, "sweep", rows, sweep=sweep, seeds=3)
    curves = plot.label(plot.read_curves(directory, "return_mean", "steps"))
    means = {name: [curve.y[0] for curve in members] for name, members in curves.items()}
    assert means == {
        "ppo on catch, learning_rate=0.01, entropy_cost=0": [0, 1, 2],
        "ppo on catch, learning_rate=0.01, entropy_cost=0.5": [3, 4, 5],
        "ppo on catch, learning_rate=0.001, entropy_cost=0": [6, 7, 8],
        "ppo on catch, learning_rate=0.001, entropy_cost=0.5": [9, 10, 11],
    }


def test_the_band_covers_the_mean_of_seeds_as_often_as_it_says():
    """Over 10 normal seeds it contains the true mean 85 to 98 times of 100 (95 in theory), and its own mean always."""
    values = np.random.default_rng(0).normal(size=(10, 400))
    low, high = plot.confidence_band(values)
    assert ((low <= values.mean(0)) & (values.mean(0) <= high)).all()
    assert 0.85 < ((low <= 0) & (high >= 0)).mean() < 0.98
    np.testing.assert_array_equal(plot.confidence_band(np.ones((1, 3)))[0], np.ones(3))


@pytest.mark.parametrize("ending", [".png", ".svg", ".pdf"])
def test_two_runs_and_a_program_of_many_are_one_picture(tmp_path, ending):
    """Written where it was asked for, with words that count the runs."""
    one = run_directory(tmp_path, "one", rows_of(0, 1, 2), seed=0)
    two = run_directory(tmp_path, "two", rows_of(0, 2, 5), seed=1)
    many = run_directory(
        tmp_path, "many", [r for m in range(3) for r in rows_of(m, 2, member=m)], seeds=3, starts="cached"
    )
    out = tmp_path / f"curves{ending}"
    text = plot.plot([one, two, many], out, title="Catch")
    assert text == f"{out}: ppo on catch (2 runs), ppo on catch, starts=cached (3 runs)"
    assert out.stat().st_size > 3000


def test_lines_and_bands_have_the_values(tmp_path):
    """The mean over seeds where both have data, and a band of the same colour around it."""
    one = run_directory(tmp_path, "one", rows_of(0, 1, 2), seed=0)
    two = run_directory(tmp_path, "two", rows_of(4, 5, 6, 7), seed=1)
    curves = plot.label([c for d in (one, two) for c in plot.read_curves(d, "return_mean", "steps")])
    (axes,) = plot.draw(curves, "return_mean", "steps", None).axes
    (line,) = axes.lines
    x, y = line.get_data()
    assert (x[0], x[-1]) == (10, 30)
    np.testing.assert_allclose([y[0], y[-1]], [2, 4])
    (band,) = axes.collections
    assert band.get_datalim(axes.transData).bounds[1] == pytest.approx(0)
    assert axes.get_ylabel() == "return, mean of the last 100 episodes"
    assert axes.get_legend().get_texts()[0].get_text() == "ppo on catch (2 seeds)"


def test_curves_that_never_overlap_and_curves_of_one_point_can_be_drawn(tmp_path):
    """One stretch over both; a point where there is only one."""
    early = run_directory(tmp_path, "early", rows_of(0, 1), seed=0)
    late = run_directory(
        tmp_path, "late", [{"steps": 1000, "return_mean": 3.0}, {"steps": 1100, "return_mean": 4.0}], seed=1
    )
    curves = plot.label([c for d in (early, late) for c in plot.read_curves(d, "return_mean", "steps")])
    x, _ = plot.draw(curves, "return_mean", "steps", None).axes[0].lines[0].get_data()
    assert (x[0], x[-1]) == (10, 1100) and (np.diff(x) > 0).all()
    point = plot.label(plot.read_curves(run_directory(tmp_path, "point", rows_of(1)), "return_mean", "steps"))
    assert plot.draw(point, "return_mean", "steps", None).axes[0].lines[0].get_marker() == "o"


def test_an_unknown_metric_is_answered_with_the_nearest_one(tmp_path):
    """And a list of those there are."""
    directory = run_directory(tmp_path, "one", rows_of(0, 1))
    with pytest.raises(UserError, match=r"no 'retrun_mean' over 'steps'. Did you mean 'return_mean'"):
        plot.plot([directory], tmp_path / "x.png", "retrun_mean")
    empty = run_directory(tmp_path, "empty", [])
    with pytest.raises(UserError, match="It has no metrics yet"):
        plot.plot([empty], tmp_path / "x.png")


def test_damaged_metrics_name_the_line_and_half_a_last_line_is_left_out(tmp_path):
    """A killed run may end in the middle of a line."""
    directory = run_directory(tmp_path, "one", rows_of(0, 1))
    path = directory / "metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole + '{"steps": 3')
    assert plot.read_curves(directory, "return_mean", "steps")[0].y.tolist() == [0, 1]
    for wrong in ("garbage\n", "[1, 2]\n"):
        path.write_text(wrong + whole)
        with pytest.raises(UserError, match=r"metrics.jsonl:1 is not a JSON object"):
            plot.plot([directory], tmp_path / "x.png")


@pytest.mark.parametrize("out", ["x.gif", "x", "missing/x.png"])
def test_pictures_that_cannot_be_written_are_refused(tmp_path, out):
    """Another ending, none, a folder that is not there."""
    with pytest.raises(UserError, match="--out is"):
        plot.plot([run_directory(tmp_path, "one", rows_of(0, 1))], tmp_path / out)


def test_a_directory_that_is_no_run_is_refused(tmp_path):
    """It has no config.json."""
    with pytest.raises(UserError, match="is not a run directory"):
        plot.plot([tmp_path], tmp_path / "x.png")
