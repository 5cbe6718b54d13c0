"""`podracer bench cost`: what a number of frames costs and how long it takes, beside what the paper says."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from launch import prices, rates, slices
from launch.machine import Machine
from launch.parse import parse
from podracer.errors import UserError, check_number


@dataclasses.dataclass(frozen=True)
class Options(Machine):
    """Options of `bench cost`."""

    steps_per_s: float | None = None
    """Your measurement: agent steps per second of the whole machine."""
    from_: str | None = dataclasses.field(default=None, metadata={"help": rates.FROM})
    type: str = "v3-8"
    """Machine whose price is taken."""
    region: str | None = None
    """Region of the price, such as us-west4; None takes the first in the table."""
    spot: bool = False
    """The price of machines that may be taken away."""
    price_per_chip_hour: float | None = None
    """USD, instead of the table's."""
    frames: float = 200e6
    """How many frames."""
    frame_skip: int | None = None
    """Frames per step; None takes what the measurement says, or 4 for --steps-per-s, as on Atari."""
    startup_s: float = 180.0
    """Seconds from the first dollar to the first program: creation, installation."""
    compile_s: float = 60.0
    """Seconds of compiling."""
    restarts: int = 0
    """How often the machine is taken away."""
    restart_s: float = 300.0
    """Seconds that each of those costs: a new start, restoring, and steps that are lost."""
    env: str = "catch"
    """Without a measurement: environment to measure on, here and now."""
    agent: str = "a2c"
    """Without a measurement: agent to measure."""
    seconds: float = 5.0
    """Without a measurement: for how long."""
    json: bool = False
    """Print JSON."""


def hours(frames: float, frames_per_s: float, extra_s: float = 0.0) -> float:
    """How long it takes."""
    return (frames / frames_per_s + extra_s) / 3600


def usd(chips: int, usd_per_chip_hour: float, frames: float, frames_per_s: float, extra_s: float = 0.0) -> float:
    """chips x price x (frames / speed + what else the machine is paid for)."""
    return chips * usd_per_chip_hour * hours(frames, frames_per_s, extra_s)


def main(arguments: list[str]) -> None:
    """Measure or read, reckon, print."""
    text = "What a number of frames costs and how long it takes, from a measurement, beside the paper's numbers."
    options = parse(Options, arguments, "podracer bench cost", text)
    _check(options)
    piece = slices.parse(options.type)
    price = prices.find(piece, options.region, options.spot, options.price_per_chip_hour)
    if price is None:
        raise UserError(f"the price of {options.type} is not known: {prices.advice(piece, options.region)}")
    rate = _rate(options)
    rows = [*_published(options.frames), _row("you", _short(rate), options, piece, price, rate)]
    if options.json:
        facts = {"measurement": rate._asdict(), "price": price._asdict(), "settings": dataclasses.asdict(options)}
        print(json.dumps({"rows": rows, **facts}, indent=2))
    else:
        _print(rows, options, piece, price, rate)


def _rate(options: Options) -> rates.Rate:
    if options.steps_per_s is not None:
        return rates.given(options.steps_per_s, options.frame_skip or 4)
    if options.from_ is not None:
        rate = rates.read(pathlib.Path(options.from_))
    else:
        rate = rates.measure(options.env, options.agent, options.seconds, options.start())
    return rate._replace(frame_skip=options.frame_skip or rate.frame_skip)


def extra_s(options: Options) -> float:
    """Seconds that are paid for beside training."""
    return options.startup_s + options.compile_s + options.restarts * options.restart_s


def _row(
    who: str, what: str, options: Options, piece: slices.Slice, price: prices.Price, rate: rates.Rate
) -> dict[str, Any]:
    speed, extra = rate.frames_per_s, extra_s(options)
    cost = usd(piece.chips, price.usd, options.frames, speed, extra)
    return {
        "who": who,
        "what": what,
        "frames_per_s": speed,
        "hours": hours(options.frames, speed, extra),
        "usd": cost,
        "machine": piece.name,
        "price": price.short(),
        "frames_per_usd": options.frames / cost,
    }


def _published(frames: float) -> list[dict[str, Any]]:
    """What the paper says of 200 M frames, in its own dollars, and its speeds at today's spot prices."""
    rows = []
    for row in slices.read_table("published.csv"):
        if row["who"] != "paper" or not row["hours_200m"]:
            continue
        speed, machine = float(row["frames_per_s"]), slices.parse(row["type"])
        # v3-16 and up have a price of their own; the paper's 16 cores are reckoned as two v3-8.
        single = prices.find(slices.parse("v3-8"), None, spot=True)
        assert single is not None
        then = float(row["usd_200m"]) if row["usd_200m"] else None
        found = {"what": row["what"], "frames_per_s": speed, "hours": hours(frames, speed), "machine": machine.name}
        if then is not None:
            rows.append({"who": "paper", **found, "usd": then * frames / 200e6, "price": "as published"})
        today = usd(machine.chips, single.usd, frames, speed)
        rows.append({"who": "paper's speed", **found, "usd": today, "price": single.short()})
    return rows


def _print(
    rows: list[dict[str, Any]], options: Options, piece: slices.Slice, price: prices.Price, rate: rates.Rate
) -> None:
    print(f"{options.frames:,.0f} frames\n")
    print(f"{'who':<14}{'what':<34}{'frames/s':>12}{'hours':>9}{'USD':>10}  {'machine':<14}price")
    for row in rows:
        numbers = f"{row['frames_per_s']:>12,.0f}{row['hours']:>9.2f}{row['usd']:>10,.2f}"
        print(f"{row['who']:<14}{row['what']:<34}{numbers}  {row['machine']:<14}{row['price']}")
    last = rows[-1]
    print(f"\n{last['frames_per_usd']:,.0f} frames per dollar ({last['frames_per_usd'] / rate.frame_skip:,.0f} steps)")
    print(f"speed: {rate.source}; {rate.steps_per_s:,.0f} steps/s x {rate.frame_skip} frames per step")
    print(f"The dollars are what {piece.name} ({piece.chips} chips, {piece.cores} cores) would cost at this speed;")
    print("that it has this speed is not said: measure it there, or see podracer bench predict.")
    print("usd = chips x price x (frames / speed + startup + compile + restarts x restart) / 3600")
    assumed = f"startup {options.startup_s:g} s, compile {options.compile_s:g} s, restarts {options.restarts}"
    print(f"assumed: {assumed} x {options.restart_s:g} s; ${price.usd:g} per chip-hour ({price.describe()})")


def _short(rate: rates.Rate) -> str:
    return f"{rate.source.partition(' (')[0].partition(':')[0].partition(' on ')[0]}"[:33]


def _check(options: Options) -> None:
    if options.steps_per_s is not None and options.from_ is not None:
        raise UserError(rates.TWO)
    if options.steps_per_s is not None:
        check_number("--steps-per-s", options.steps_per_s, minimum=0, exclusive=True)
    for flag, value in (("--frames", options.frames), ("--seconds", options.seconds)):
        check_number(flag, value, minimum=0, exclusive=True)
    for name in ("startup_s", "compile_s", "restarts", "restart_s"):
        check_number(f"--{name.replace('_', '-')}", getattr(options, name), minimum=0)
    check_number("--frame-skip", options.frame_skip, minimum=1, whole=True)


class PerDollar:
    """Frames per dollar of a named machine, for the end of a run; made before it, to refuse a wrong name in time."""

    def __init__(self, name: str):
        self._piece = slices.parse(name)
        price = prices.find(self._piece, None, spot=False)
        if price is None:
            advice = prices.advice(self._piece, None).partition(" Give")[0]
            raise UserError(f"--cost-type {name}: {advice} Choose another, or use podracer bench cost.")
        self._price = price

    def line(self, frames_per_s: float, frame_skip: int) -> str:
        """One line about a run of this speed."""
        rate = frames_per_s * 3600 / (self._price.usd * self._piece.chips)
        both = f"{rate:,.0f} frames" + (f" ({rate / frame_skip:,.0f} steps)" if frame_skip > 1 else " (= steps)")
        per_hour = f"${self._price.usd * self._piece.chips:,.2f} per hour"
        return f"{both} per dollar, if {self._piece.name} ran at this speed ({per_hour}, {self._price.describe()})"
