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
    facts: tuple[tuple[str, str], ...]  # all that was set, without the seed: curves with the same facts are one group


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
    check_out(out)
    groups = label([curve for directory in directories for curve in read_curves(directory, metric, x)])
    save(draw(groups, metric, x, title), out)
    return f"{out}: " + ", ".join(f"{name} ({_count(len(curves))})" for name, curves in groups.items())


def check_out(out: pathlib.Path) -> None:
    """Refuse a file that cannot become a picture, before anything is done for it.

    Raises:
      UserError: its ending or its folder is wrong.
    """
    if out.suffix not in FORMATS:
        raise UserError(f"--out is '{out}'; expected a name ending in {', '.join(FORMATS)}.")
    if not out.absolute().parent.is_dir():
        raise UserError(f"--out is '{out}', but the folder {out.parent} does not exist. Create it first.")


def save(figure: Any, out: pathlib.Path) -> None:
    """Write a figure.

    Raises:
      UserError: the file cannot be written.
    """
    try:
        figure.savefig(out, dpi=150, bbox_inches="tight")
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror}. Choose another --out.") from error


def read_curves(directory: pathlib.Path, metric: str, x: str) -> list[Curve]:
    """The curve of each run in a directory.

    Raises:
      UserError: there is no such metric, or the file of metrics is damaged.
    """
    content = config.read(directory)
    rows = _rows(pathlib.Path(directory) / "metrics.jsonl")
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
    return [_curve(points, _facts(content, directory, member)) for member, points in members.items()]


def label(curves: list[Curve]) -> dict[str, list[Curve]]:
    """Curves by what tells them apart: agent and environment, and settings that differ among those of the same two."""
    same: dict[str, list[Curve]] = {}
    for curve in curves:
        facts = dict(curve.facts)
        name = f"{facts['agent']} on {facts['env']}" if "agent" in facts else facts["run"]
        same.setdefault(name, []).append(curve)
    groups: dict[str, list[Curve]] = {}
    for name, members in same.items():
        common = set.intersection(*(set(curve.facts) for curve in members))
        for curve in members:
            differs = [f"{fact}={value}" for fact, value in curve.facts if (fact, value) not in common]
            groups.setdefault(", ".join([name, *differs]), []).append(curve)
    return groups


def _rows(path: pathlib.Path) -> list[dict[str, Any]]:
    rows = []
    lines = path.read_text().splitlines() if path.is_file() else []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            if number < len(lines):  # the last line of a killed run may be half of one
                raise UserError(f"{path}:{number} is not a JSON object. Remove that line.") from None
    return rows


def draw(groups: dict[str, list[Curve]], metric: str, x: str, title: str | None) -> Any:
    """A matplotlib figure of the groups."""
    figure, axes = empty(title)
    for label, curves in groups.items():
        # Where all of the group have data; without such a stretch, wherever any has.
        start, end = max(c.x[0] for c in curves), min(c.x[-1] for c in curves)
        if start > end:
            start, end = min(c.x[0] for c in curves), max(c.x[-1] for c in curves)
        grid = np.linspace(start, end, POINTS)
        values = np.stack([np.interp(grid, c.x, c.y) for c in curves])
        name = label if len(curves) == 1 else f"{label} ({len(curves)} seeds)"
        (line,) = axes.plot(grid, values.mean(0), label=name, linewidth=1.8, marker="o" if start == end else None)
        if len(curves) > 1:
            low, high = confidence_band(values)
            axes.fill_between(grid, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set_xlabel({"train_s": "training time (s)"}.get(x, x))
    axes.set_ylabel({"return_mean": "return, mean of the last 100 episodes"}.get(metric, metric))
    axes.ticklabel_format(axis="x", style="sci", scilimits=(-3, 5), useMathText=True)
    axes.legend(frameon=False)
    return figure


def empty(title: str | None, size: tuple[float, float] = (7, 4.2)) -> tuple[Any, Any]:
    """`(figure, axes)`, empty, in the style of all; `size` in inches."""
    figure, (axes,) = empty_row(1, size)
    if title:
        axes.set_title(title)
    return figure, axes


def empty_row(panels: int, size: tuple[float, float]) -> tuple[Any, list[Any]]:
    """`(figure, [axes, ...])`: several panels side by side, in the style of all."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(1, panels, figsize=size, squeeze=False)
    for axes in grid[0]:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    pyplot.close(figure)  # pyplot forgets it; it can still be drawn on and saved
    return figure, list(grid[0])


def confidence_band(values: np.ndarray, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """Percentile bootstrap of the mean over seeds. `values` [S, P] -> low [P], high [P]."""
    chosen = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    means = np.stack([values[rows].mean(0) for rows in chosen])
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return low, high


def _curve(points: list[tuple[float, float]], facts: dict[str, str]) -> Curve:
    x, y = np.asarray(sorted(points), np.float64).T
    return Curve(x, y, tuple(facts.items()))


def _facts(content: dict[str, Any], directory: pathlib.Path, member: int | None) -> dict[str, str]:
    """Everything about a run that may make a difference, but for its seed."""
    settings, recipe = content["settings"], content.get("recipe")
    neutral = (
        "total_steps",
        "updates_per_call",
        "seed",
        "seeds",
        "sweep",
        "evaluations",
        "eval_episodes",
        "keep",
        "nan",
        "tensorboard",
        "wandb",
        "profile",
        "metrics_port",
    )
    facts: dict[str, Any] = {name: value for name, value in settings.items() if name not in neutral}
    facts["cores"] = content.get("num_cores")
    if recipe is None:
        facts["run"] = pathlib.Path(directory).absolute().name
    else:
        facts |= {name: recipe[name] for name in ("agent", "env", "network")}
        for part in ("agent_config", "env_options", "network_config"):
            facts |= {name if name not in facts else f"{part}.{name}": v for name, v in (recipe[part] or {}).items()}
    if member is not None:
        facts |= config.swept_values(settings, member)
    return {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in facts.items()}


def _count(number: int) -> str:
    return f"{number} run{'s' if number != 1 else ''}"
