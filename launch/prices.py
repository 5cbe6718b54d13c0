"""What TPU slices cost, by the dated table of `data/prices.csv`; what is not in it is unknown, never guessed."""

from __future__ import annotations

from typing import NamedTuple

from launch.slices import Slice, read_table
from podracer.errors import check_number

PLACEHOLDER = 700.0  # what the catalogue that the table was made from writes where it knows no price


class Price(NamedTuple):
    """USD per chip and hour, and where that comes from."""

    usd: float
    kind: str  # on demand, spot, or given by the user
    region: str | None
    source: str
    read: str  # date

    def short(self) -> str:
        return self.kind + ("" if self.region is None else f", {self.region}")

    def describe(self) -> str:
        where = "" if self.region is None else f" in {self.region}"
        return f"{self.kind}{where}, {self.source}" + (f", read {self.read}" if self.read else "")


def find(piece: Slice, region: str | None, spot: bool, given: float | None = None) -> Price | None:
    """The price of a chip of this slice, or None where it is not known.

    Args:
      piece: the slice; some single hosts (v2-8, v3-8) have prices of their own.
      region: such as us-central1, or a zone of it; None takes the first that the table has.
      spot: whether it may be taken away at any time, for less.
      given: the user's own price, which comes before the table.

    Raises:
      UserError: the user's price is not a number above 0.
    """
    check_number("--price-per-chip-hour", given, minimum=0, exclusive=True)
    kind = "spot" if spot else "on demand"
    if given is not None:
        return Price(given, kind, None, "--price-per-chip-hour", "")
    for row in _rows(piece):
        if region is None or region == row["region"] or region.startswith(row["region"] + "-"):
            text = row["spot" if spot else "on_demand"]
            if text and float(text) != PLACEHOLDER:
                return Price(float(text), kind, row["region"], row["source"], row["read"])
    return None


def per_hour(piece: Slice, region: str | None, spot: bool, given: float | None = None) -> str:
    """A line for the user: what an hour of the slice costs, or that nobody knows and what to do."""
    price = find(piece, region, spot, given)
    if price is None:
        return f"price of {piece.name}: unknown; {advice(piece, region)}"
    return (
        f"price: ${price.usd * piece.chips:,.2f} per hour = {piece.chips} chips x ${price.usd:g} ({price.describe()})"
    )


def advice(piece: Slice, region: str | None) -> str:
    """Where the table has prices of such a slice, and how to give one's own."""
    known = [row["region"] for row in _rows(piece)]
    where = "" if region is None else f" in {region}"
    regions = f" (there are: {', '.join(dict.fromkeys(known))})" if known else ""
    return f"the table has none{where}{regions}. Give --price-per-chip-hour."


def _rows(piece: Slice) -> list[dict[str, str]]:
    """The prices of this very slice, or where it has none those of its generation."""
    table = read_table("prices.csv")
    own = [row for row in table if row["type"] == piece.name]
    return own or [row for row in table if row["type"] == piece.generation.name]
