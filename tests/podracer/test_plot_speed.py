"""Pictures of throughput: what is drawn where, and what the captions must say."""

from __future__ import annotations

import pytest

from podracer import plot_speed


def spread(name, value):
    return {f"{name}_median": value, f"{name}_low": 0.9 * value, f"{name}_high": 1.1 * value}


def weak(cores, speed, efficiency, measurement="a"):
    numbers = spread("steps_per_s", speed) | spread("efficiency", efficiency)
    return {"cores": cores, "hosts": 1, "measurement": measurement, **numbers}


def points(axes):
    """`{label: [(x, y)]}` of the lines of a panel."""
    return {line.get_label(): list(zip(*line.get_data())) for line in axes.lines}


def text(figure):
    return " ".join(figure.get_supxlabel().split())


def test_weak_scaling_shows_the_ideal_beside_what_was_measured():
    figure = plot_speed.draw_weak({"tpu": [weak(4, 300, 0.75), weak(1, 100, 1.0)]}, "steps", "title", pinned=False)
    left, right = figure.axes
    lines = list(points(left).values())
    assert lines[0] == [(1, 100), (4, 300)] and lines[1] == [(1, 100), (4, 400)]
    assert points(right)["tpu"] == [(1, 1), (4, 0.75)]
    assert [each.get_text() for each in right.texts] == ["75%"]
    assert "pinned" not in text(figure) and "Measured" in text(figure)


def test_points_of_another_measurement_are_compared_by_their_medians():
    """The efficiency that it has itself is against its own smallest point."""
    rows = [weak(1, 100, 1.0), weak(8, 640, 1.0, measurement="b")]
    _, right = plot_speed.draw_weak({"tpu": rows}, "steps", "title", pinned=True).axes
    assert points(right)["tpu"] == [(1, 1), (8, 0.8)]


def test_virtual_cores_are_called_what_they_are():
    """Overhead and not scaling, in the title and in the caption; baselines are no points."""

    def row(cores, overhead, environments, baseline):
        numbers = spread("frames_per_s", 100) | spread("overhead", overhead)
        where = {"cores": cores, "hosts": 1, "environments": environments, "baseline": baseline}
        return {**where, "against_environments": 32, **numbers}

    rows = [row(1, 0.2, 64, False), row(2, 0.1, 64, False), row(1, 0.0, 32, True)]
    figure = plot_speed.draw_overhead(rows, "frames", "ppo on catch", "2 processors")
    left, _ = figure.axes
    assert points(left)["one process"] == [(1, 0.2), (2, 0.1)]
    assert "overhead of virtual cores at constant total work (64 environments)" in figure.get_suptitle()
    for words in ("NOT how speed grows with cores", "share 2 processors", "super-linear", "32 environments"):
        assert words in text(figure)


@pytest.mark.parametrize("dashed", ["", "limit"])
def test_a_sweep_draws_medians_from_low_to_high(dashed):
    lines = {"training": ([16, 32], [[2, 1, 3], [4, 3, 5]]), "limit": ([16], [[9, 8, 10]])}
    (axes,) = plot_speed.draw_spreads(lines, "environments", "steps per second", "title", dashed).axes
    assert points(axes)["training"] == [(16, 2), (32, 4)]
    assert [line.get_linestyle() == "--" for line in axes.lines] == [False, bool(dashed)]
    assert axes.get_ylim()[0] == 0 and axes.get_xscale() == "log"
