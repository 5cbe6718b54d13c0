"""Pictures of throughput: against the number of cores, and against a setting. Rows are those of the tables beside them.

A line is the median of the rounds, the band around it reaches from the lowest to the highest.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from podracer.plot import empty, empty_row

Row = Mapping[str, Any]
GREY = "0.4"
CAPTION_WIDTH = 168  # letters
STRAIGHT = 16  # times as many cores as the smallest point has fit on a linear axis


def draw_spreads(
    lines: Mapping[str, tuple[Sequence[float], Sequence[Sequence[float]]]], x: str, y: str, title: str, dashed: str = ""
) -> Any:
    """A matplotlib figure of several measurements of each point.

    Args:
      lines: by label, the horizontal values and for each of them [median, low, high].
      x, y: labels of the axes; y begins at 0, x is in powers of 2.
      dashed: the label of the line that is a limit.
    """
    figure, axes = empty(title)
    for name, (at, spreads) in lines.items():
        _band(axes, at, spreads, name, limit=name == dashed)
    _powers_of_two(axes, [value for at, _ in lines.values() for value in at])
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_ylim(bottom=0)
    _thousands(axes)
    if len(lines) > 1:
        axes.legend(frameon=False)
    return figure


def draw_weak(lines: Mapping[str, Sequence[Row]], unit: str, title: str, pinned: bool) -> Any:
    """Weak scaling: throughput beside what the smallest point times the cores would be, and throughput per core.

    Args:
      lines: by label, rows with `cores`, and the spreads of `{unit}_per_s` and of `efficiency` where they are of one
        measurement.
      unit: "steps" or "frames".
      pinned: the cores are processes on a CPU.
    """
    figure, left, right = _two_panels(title, (10.5, 4.4))
    for name, rows in lines.items():
        rows = sorted(rows, key=lambda row: row["cores"])
        base, cores = rows[0], [row["cores"] for row in rows]
        per_core = base[f"{unit}_per_s_median"] / base["cores"]
        line = _band(left, cores, [_spread(row, f"{unit}_per_s") for row in rows], name)
        left.plot(cores, [per_core * count for count in cores], linestyle="--", linewidth=1.2, color=line.get_color())
        _band(right, cores, [_efficiency(row, base, unit) for row in rows], name)
        _label_last(right, cores, [_efficiency(row, base, unit)[0] for row in rows])
    everywhere = [row["cores"] for rows in lines.values() for row in rows]
    left.plot([], [], linestyle="--", linewidth=1.2, color=GREY, label="ideal: the smallest point times the cores")
    left.set(xlabel="cores", ylabel=f"{unit} per second")
    right.axhline(1, linestyle="--", linewidth=1.2, color=GREY)
    right.set(xlabel="cores", ylabel="throughput per core, of the smallest point's", ylim=(0, None))
    right.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    _powers_of_two(right, everywhere)
    if max(everywhere) > STRAIGHT * min(everywhere):  # the ideal is a straight line on both kinds of axes
        _powers_of_two(left, everywhere)
        left.set_yscale("log")
    else:
        left.set_xticks(sorted(set(everywhere)))
        left.set(xlim=(0, None), ylim=(0, None))
        _thousands(left)
    left.legend(frameon=False)
    text = "Measured. Every core has environments of its own, so that the work grows with the cores. "
    if pinned:
        text += "Each core is a process pinned to a physical core of one machine; they meet through its network stack. "
    _caption(figure, text + "Lines: medians of the rounds; bands: lowest to highest round.")
    return figure


def draw_overhead(rows: Sequence[Row], unit: str, what: str, processors: str) -> Any:
    """Virtual cores: CPU time per step against the best single core, and throughput, with the same work in total.

    Args:
      rows: with `hosts`, `cores`, `baseline`, and the spreads of `overhead` and of `{unit}_per_s`.
      processors: how many there are in truth, in words.
    """
    points = [row for row in rows if not row["baseline"]]
    environments, best = points[0]["environments"], points[0]["against_environments"]
    title = f"{what}: overhead of virtual cores at constant total work ({environments:,} environments)"
    figure, left, right = _two_panels(title, (10.5, 4.6))
    for hosts in sorted({row["hosts"] for row in points}):
        mine = sorted((row for row in points if row["hosts"] == hosts), key=lambda row: row["cores"])
        cores, name = [row["cores"] for row in mine], "one process" if hosts == 1 else f"{hosts} processes"
        _band(left, cores, [_spread(row, "overhead") for row in mine], name)
        _label_last(left, cores, [row["overhead_median"] for row in mine])
        _band(right, cores, [_spread(row, f"{unit}_per_s") for row in mine], name)
    left.axhline(0, linestyle="--", linewidth=1.2, color=GREY)
    where: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    left.annotate("the best single core", (0.01, 0), xytext=(0, -11), color=GREY, fontsize=9, **where)
    left.set(xlabel="virtual cores", ylabel="CPU time per step, above the best single core")
    left.yaxis.set_major_formatter(lambda value, _: f"{value:+.0%}")
    low, high = left.get_ylim()
    left.set_ylim(min(low, -0.1), max(high, 0.3))
    right.set(xlabel="virtual cores", ylabel=f"{unit} per second, wall time", ylim=(0, None))
    for axes in (left, right):
        _powers_of_two(axes, [row["cores"] for row in points])
    _thousands(right)
    right.legend(frameon=False, loc="lower left")
    text = (
        f"This shows what more virtual cores cost, NOT how speed grows with cores: all share {processors} of one CPU "
        "and do the same work in total. Throughput grows only until the processors are busy; caches can make many "
        "small batches cheaper than a large one and look super-linear. So the baseline is one core with the batch that "
        f"suits it best, of those that the points give a core: {best:,} environments. Bands: lowest to highest round."
    )
    _caption(figure, text)
    return figure


def _two_panels(title: str, size: tuple[float, float]) -> tuple[Any, Any, Any]:
    figure, (left, right) = empty_row(2, size)
    figure.set_layout_engine("constrained")  # room for what stands above and below both
    figure.suptitle(title)
    return figure, left, right


def _band(axes: Any, at: Sequence[float], spreads: Sequence[Sequence[float]], name: str, limit: bool = False) -> Any:
    median, low, high = np.asarray(spreads).T
    style: dict[str, Any] = {"linestyle": "--", "color": GREY} if limit else {}
    (line,) = axes.plot(at, median, label=name, linewidth=1.8, marker="o", **style)
    axes.fill_between(at, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    if len(at) == 1:  # a band of one point cannot be seen
        axes.vlines(at, low, high, color=line.get_color(), alpha=0.5)
    return line


def _spread(row: Row, name: str) -> list[float]:
    return [row[f"{name}_{which}"] for which in ("median", "low", "high")]


def _efficiency(row: Row, base: Row, unit: str) -> list[float]:
    """Round by round where both were measured in turns; else of the medians."""
    if (
        row.get("measurement") == base.get("measurement")
        and "efficiency_median" in row
        and base["efficiency_median"] == 1
    ):
        return _spread(row, "efficiency")
    per_core = base[f"{unit}_per_s_median"] / base["cores"]
    return [value / row["cores"] / per_core for value in _spread(row, f"{unit}_per_s")]


def _label_last(axes: Any, at: Sequence[float], values: Sequence[float]) -> None:
    """The number of the last point, which is what one looks for."""
    axes.annotate(f"{values[-1]:.0%}", (at[-1], values[-1]), xytext=(7, -11), textcoords="offset points", fontsize=9)


def _powers_of_two(axes: Any, values: Sequence[float]) -> None:
    ticks = sorted(set(values))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{value:g}" for value in ticks], minor=False)
    axes.margins(x=0.12)


def _thousands(axes: Any) -> None:
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _caption(figure: Any, text: str) -> None:
    """Below the panels."""
    figure.supxlabel(textwrap.fill(text, CAPTION_WIDTH), fontsize=8, color="0.25")
