"""`podracer bench predict`: the model of `scaling_model.py` as a picture, beside the published points."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from launch import prices, rates, results, scaling_model, slices
from launch.parse import parse
from podracer import plot
from podracer.errors import UserError, check_number

TITLE = "prediction, not measured"
MARKERS = {"paper": "o", "InstaDeep": "s"}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `bench predict`."""

    type: str = "v5litepod-256"
    """Largest slice."""
    steps_per_s: float | None = None
    """Agent steps per second of ONE core, measured."""
    update_ms: float | None = None
    """Length of one update on that core, measured."""
    params_bytes: int | None = None
    """Bytes of the parameters: 4 per float32."""
    from_: str | None = dataclasses.field(default=None, metadata={"help": rates.FROM})
    frame_skip: int | None = None
    """Frames per step; None takes what the measurement says, or 4, as on Atari."""
    reduces_per_update: int | None = None
    """All-reduces of gradients per update; None takes the epochs times minibatches of what was measured, or 1."""
    link_gb_per_s: float | None = None
    """GB/s out of a chip in one direction over all links; None takes what is known of the generation."""
    out: str = "bench-predict.png"
    """Picture to write, .png, .svg or .pdf; the numbers go beside it as .csv, the assumptions as .json."""


def main(arguments: list[str]) -> None:
    """Read or take the measurement, reckon, draw."""
    text = "Predict how a measured core would scale over a TPU slice, beside published points. A model, no measurement."
    options = parse(Options, arguments, "podracer bench predict", text)
    piece = slices.parse(options.type)
    out = pathlib.Path(options.out)
    plot.check_out(out)
    _check(options)
    generation = piece.generation
    bandwidth = options.link_gb_per_s or generation.ici_gb_per_s
    if bandwidth is None:
        raise UserError(f"the bandwidth between chips of {generation.name} is not known. Give --link-gb-per-s.")
    measured, skip, source = _measured(options)
    points = scaling_model.predict(generation, piece.cores, measured, bandwidth * 1e9)
    facts = _facts(options, piece, measured, skip, source, bandwidth)
    figure = _draw(points, piece, measured, skip, source, bandwidth)
    results.write(out, _rows(points, skip), facts, figure)
    _print(points, piece, skip, measured, source)


def _measured(options: Options) -> tuple[scaling_model.Measured, int, str]:
    """The measurement of one core, frames per step, and whose it is."""
    if options.from_ is not None:
        rate = rates.read(pathlib.Path(options.from_))
        cores = rate.cores or 1
        source = rate.source + (f", a core's share of {cores}" if cores > 1 else "")
        given = [f"--{name.replace('_', '-')}" for name in ("update_ms", "params_bytes") if getattr(options, name)]
        source += f"; you gave {' and '.join(given)}" if given else ""
    elif options.steps_per_s is not None:
        rate, cores = rates.given(options.steps_per_s, 4, 1), 1
        source = "your measurement of one core"
    else:
        raise UserError("no measurement; expected --from RUN, or --steps-per-s, --update-ms and --params-bytes.")
    update_s = options.update_ms / 1e3 if options.update_ms is not None else rate.update_s
    size = options.params_bytes or rate.params_bytes
    for flag, value in (("--update-ms", update_s), ("--params-bytes", size)):
        if value is None:
            raise UserError(f"{flag} is missing, and the measurement does not say it. Give {flag}.")
    assert update_s is not None and size is not None
    reduces = options.reduces_per_update or rate.reduces or 1
    measured = scaling_model.Measured(rate.steps_per_s / cores, update_s, size, reduces)
    return measured, options.frame_skip or rate.frame_skip, source


def _rows(points: list[scaling_model.Point], skip: int) -> list[dict[str, Any]]:
    names = ("model", "worst", "ideal")
    rows = []
    for point in points:
        row: dict[str, Any] = {"cores": point.cores, "chips": point.chips}
        row |= {"topology": "x".join(map(str, point.topology)), "reduce_ms": point.reduce_s * 1e3}
        row |= {f"frames_per_s_{name}": rate * skip for name, rate in zip(names, point.steps_per_s, strict=True)}
        rows.append(row | {f"efficiency_{name}": each for name, each in zip(names, point.efficiency, strict=True)})
    return rows


def _facts(
    options: Options,
    piece: slices.Slice,
    measured: scaling_model.Measured,
    skip: int,
    source: str,
    bandwidth: float,
) -> dict[str, Any]:
    return {
        "what": TITLE,
        "model": " ".join((scaling_model.__doc__ or "").split()),
        "assumptions": scaling_model.ASSUMPTIONS,
        "measured": measured._asdict() | {"frame_skip": skip, "source": source},
        "slice": piece.describe(),
        "link_gb_per_s": bandwidth,
        "hop_us": scaling_model.HOP_S * 1e6,
        "worst_hop_us": scaling_model.WORST_HOP_S * 1e6,
        "worst_part_of_bandwidth": scaling_model.WORST_BANDWIDTH,
        "published": slices.read_table("published.csv"),
        "price": prices.per_hour(piece, None, False),
        "settings": dataclasses.asdict(options),
    }


def _print(
    points: list[scaling_model.Point], piece: slices.Slice, skip: int, measured: scaling_model.Measured, source: str
) -> None:
    last = points[-1]
    modelled, worst, _ = (100 * each for each in last.efficiency)
    print(f"{TITLE}: {last.cores:,} cores of {piece.generation.name}: {last.steps_per_s[0] * skip:,.0f} frames/s,")
    sums = f"{measured.reduces_per_update} sum{'s' if measured.reduces_per_update > 1 else ''} of gradients per update"
    print(f"{modelled:.1f} % of perfect scaling ({worst:.1f} % at worst) with {sums}; {source}")
    price = prices.find(piece, None, False)
    if price is not None:
        per_hour = price.usd * piece.chips
        print(f"{last.steps_per_s[0] * skip * 3600 / per_hour:,.0f} frames per dollar ({price.describe()})")


def _draw(
    points: list[scaling_model.Point],
    piece: slices.Slice,
    measured: scaling_model.Measured,
    skip: int,
    source: str,
    bandwidth: float,
) -> Any:
    """Throughput and efficiency against cores: dashed with a band, published points as marks."""
    figure, axes = plot.empty_row(2, (11.5, 5.4))
    cores = [point.cores for point in points]
    rates_ = [[rate * skip for rate in point.steps_per_s] for point in points]
    efficiency = [[100 * each for each in point.efficiency] for point in points]
    label = f"model, {piece.generation.name}"
    for panel, values in zip(axes, (rates_, efficiency), strict=True):
        modelled, worst, ideal = zip(*values, strict=True)
        panel.fill_between(cores, worst, ideal, color="C0", alpha=0.18, linewidth=0)
        panel.plot(cores, ideal, color="0.55", linewidth=1, label="perfect scaling")
        panel.plot(cores, modelled, "--", marker=".", color="C0", linewidth=1.8, label=label)
    _published(axes)
    left, right = axes
    left.set_yscale("log")
    left.set_ylabel("frames per second")
    right.set_ylabel("throughput per core, % of the smallest size")
    right.set_ylim(min(50.0, 90 * min(point.efficiency[1] for point in points)), 105)
    for panel in axes:
        panel.set_xscale("log", base=2)
        panel.set_xlabel("cores (TensorCores)")
        ticks = [4**k for k in range(7) if 4**k <= max(panel.get_xlim()[1], 1)]
        panel.set_xticks(ticks, [f"{tick:,}" for tick in ticks], minor=False)
    left.legend(frameon=False, fontsize=8, loc="lower right", handlelength=3)
    figure.suptitle(f"{TITLE}: weak scaling up to {piece.name}", fontweight="bold")
    figure.text(0.5, 0.01, _caption(measured, skip, source, bandwidth), ha="center", va="bottom", fontsize=8)
    figure.tight_layout(rect=(0, 0.1, 1, 1.0))
    return figure


def _published(axes: Any) -> None:
    """The points of the paper and of InstaDeep, as they were published; efficiency against the smallest of a series."""
    series: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in slices.read_table("published.csv"):
        generation = slices.parse(row["type"]).generation.name
        name = row["what"].partition(",")[0]
        name += ", steps/s" if "(steps)" in row["what"] else f" ({generation})"
        series.setdefault((row["who"], name), []).append((int(row["cores"]), float(row["frames_per_s"])))
    for number, ((who, what), found) in enumerate(series.items(), 1):
        style: dict[str, Any] = {"marker": MARKERS[who], "linestyle": "none", "markersize": 6, "color": f"C{number}"}
        style |= {"markerfacecolor": "none"} if who != "paper" else {}
        axes[0].plot(*zip(*found, strict=True), label=f"{who}: {what}", **style)
        least, rate = max((point for point in found if point[0] == min(c for c, _ in found)), key=lambda p: p[1])
        beyond = [(cores, 100 * speed / cores / (rate / least)) for cores, speed in found if cores > least]
        if beyond and "steps/s" not in what:  # Anakin's two points are of two tasks
            axes[1].plot(*zip(*beyond, strict=True), **style)


def _caption(measured: scaling_model.Measured, skip: int, source: str, bandwidth: float) -> str:
    first = (
        f"One core: {measured.steps_per_s:,.0f} steps/s x {skip} frames per step, "
        f"{measured.update_s * 1e3:,.2f} ms per update, {measured.params_bytes / 1e6:,.2f} MB of parameters; {source}."
    )
    second = (
        f"t(N) = t(1) + {measured.reduces_per_update} x (2(n-1)/n P/W + alpha (n1 + n2 + ...)), W = {bandwidth:g} GB/s,"
        " alpha = 1 us; band: no communication ... alpha = 5 us and W/2."
    )
    third = (
        "Marks: as published, on other chips, with other networks; a core is a TensorCore, on v5e and v6e a whole chip."
        " The paper's chips are taken to be v3."
    )
    return "\n".join((first, second, third))


def _check(options: Options) -> None:
    if options.steps_per_s is not None and options.from_ is not None:
        raise UserError(rates.TWO)
    for name in ("steps_per_s", "update_ms", "params_bytes", "link_gb_per_s"):
        check_number(f"--{name.replace('_', '-')}", getattr(options, name), minimum=0, exclusive=True)
    check_number("--frame-skip", options.frame_skip, minimum=1)
    check_number("--reduces-per-update", options.reduces_per_update, minimum=1)
