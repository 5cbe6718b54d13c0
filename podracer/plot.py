"""Learning curves of several runs in one picture, with confidence bands over seeds."""

from __future__ import annotations

import json
import pathlib
from typing import Any, NamedTuple

import numpy as np

from podracer import config
from podracer.errors import UserError, closest

FORMATS = (".png", ".svg", ".pdf")
POINTS = 200  # of the common horizontal grid
RESAMPLES = 1000  # of the bootstrap


class Curve(NamedTuple):
    """One run, or one member of many trained in one program."""

    x: np.ndarray  # [P] increasing
    y: np.ndarray  # [P]


def plot(
    directories: list[pathlib.Path],
    out: pathlib.Path,
    metric: str = "return_mean",
    x: str = "steps",
    title: str | None = None,
) -> str:
    """Draw the runs; those that differ only in their seed become one line, the mean, with a 95 % bootstrap band.

    Returns:
      What was drawn, in words.

    Raises:
      UserError: a directory is not a run, has no such metric, or `out` cannot be written.
    """
    if out.suffix not in FORMATS:
        raise UserError(f"--out is '{out}'; expected a name ending in {', '.join(FORMATS)}.")
    if not out.absolute().parent.is_dir():
        raise UserError(f"--out is '{out}', but the folder {out.parent} does not exist. Create it first.")
    groups: dict[str, list[Curve]] = {}
    for directory in directories:
        for label, curve in read_curves(directory, metric, x):
            groups.setdefault(label, []).append(curve)
    figure = draw(groups, metric, x, title)
    figure.savefig(out, dpi=150, bbox_inches="tight")
    return f"{out}: " + ", ".join(f"{label} ({len(curves)})" for label, curves in groups.items())


def read_curves(directory: pathlib.Path, metric: str, x: str) -> list[tuple[str, Curve]]:
    """`(label, curve)` of each run in a directory; the label leaves out the seed.

    Raises:
      UserError: there is no such metric.
    """
    content = config.read(directory)
    path = directory / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    members: dict[Any, list[tuple[float, float]]] = {}
    for row in rows:
        if metric in row and x in row:
            members.setdefault(row.get("member"), []).append((row[x], row[metric]))
    if not members:
        known = sorted({name for row in rows for name in row})
        raise UserError(
            f"{directory} has no '{metric}' over '{x}'.{closest(metric, known)} "
            f"It has {', '.join(known) if known else 'no metrics yet'}."
        )
    return [(_label(content, directory, member), _curve(points)) for member, points in members.items()]


def draw(groups: dict[str, list[Curve]], metric: str, x: str, title: str | None) -> Any:
    """A matplotlib figure of the groups."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for label, curves in groups.items():
        grid = np.linspace(max(c.x[0] for c in curves), min(c.x[-1] for c in curves), POINTS)
        values = np.stack([np.interp(grid, c.x, c.y) for c in curves])
        name = label if len(curves) == 1 else f"{label} ({len(curves)} seeds)"
        (line,) = axes.plot(grid, values.mean(0), label=name, linewidth=1.8)
        if len(curves) > 1:
            low, high = confidence_band(values)
            axes.fill_between(grid, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set_xlabel({"train_s": "training time (s)"}.get(x, x))
    axes.set_ylabel({"return_mean": "return, mean of the last 100 episodes"}.get(metric, metric))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.ticklabel_format(axis="x", style="sci", scilimits=(-3, 5), useMathText=True)
    axes.legend(frameon=False)
    if title:
        axes.set_title(title)
    pyplot.close(figure)
    return figure


def confidence_band(values: np.ndarray, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """Percentile bootstrap of the mean over seeds. `values` [S, P] -> low [P], high [P]."""
    chosen = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    means = np.stack([values[rows].mean(0) for rows in chosen])
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return low, high


def _curve(points: list[tuple[float, float]]) -> Curve:
    x, y = np.asarray(sorted(points), np.float64).T
    return Curve(x, y)


def _label(content: dict[str, Any], directory: pathlib.Path, member: int | None) -> str:
    recipe = content.get("recipe")
    if recipe is None:
        return directory.name
    label = f"{recipe['agent']} on {recipe['env']}"
    swept = content["settings"].get("sweep") or []
    if member is None or not swept:
        return label
    # Members are ordered as the product of the swept values and, innermost, the seeds.
    member //= content["settings"]["seeds"]
    parts = []
    for item in reversed(swept):
        name, _, values = item.partition("=")
        member, which = divmod(member, len(values.split(",")))
        parts.append(f"{name}={values.split(',')[which]}")
    return f"{label}, {', '.join(reversed(parts))}"
