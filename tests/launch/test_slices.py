"""TPU slices and their prices, against what Google and the table say, written out here."""

from __future__ import annotations

import csv
import datetime
import pathlib
import tomllib

import pytest

import launch
from launch import prices, slices
from podracer.errors import UserError

# name, chips, cores, hosts, topology, JAX devices, machine type: from Google's pages of each generation.
KNOWN = [
    ("v2-8", 4, 8, 1, "2x2", 8, None),
    ("v3-8", 4, 8, 1, "2x2", 8, "ct3p-hightpu-4t"),
    ("v3-2048", 1024, 2048, 256, "32x32", 2048, "ct3p-hightpu-4t"),
    ("v4-8", 4, 8, 1, "2x2x1", 4, "ct4p-hightpu-4t"),
    ("v4-32", 16, 32, 4, "2x2x4", 16, "ct4p-hightpu-4t"),
    ("v4-2048", 1024, 2048, 256, "8x8x16", 1024, "ct4p-hightpu-4t"),
    ("v5litepod-1", 1, 1, 1, "1x1", 1, "ct5lp-hightpu-1t"),
    ("v5litepod-8", 8, 8, 1, "2x4", 8, "ct5lp-hightpu-8t"),
    ("v5litepod-16", 16, 16, 4, "4x4", 16, "ct5lp-hightpu-4t"),
    ("v5litepod-128", 128, 128, 32, "8x16", 128, "ct5lp-hightpu-4t"),
    ("v5litepod-256", 256, 256, 64, "16x16", 256, "ct5lp-hightpu-4t"),
    ("v5p-8", 4, 8, 1, "2x2x1", 4, "ct5p-hightpu-4t"),
    ("v5p-256", 128, 256, 32, "4x4x8", 128, "ct5p-hightpu-4t"),
    ("v6e-8", 8, 8, 1, "2x4", 8, "ct6e-standard-8t"),
    ("v6e-256", 256, 256, 64, "16x16", 256, "ct6e-standard-4t"),
    ("tpu7x-8", 4, 8, 1, "2x2x1", 8, "tpu7x-standard-4t"),
    ("tpu7x-16", 8, 16, 2, "2x2x2", 16, "tpu7x-standard-4t"),
]


@pytest.mark.parametrize("name, chips, cores, hosts, topology, devices, machine", KNOWN)
def test_sizes(name, chips, cores, hosts, topology, devices, machine):
    piece = slices.parse(name)
    assert (piece.name, piece.chips, piece.cores, piece.hosts) == (name, chips, cores, hosts)
    assert (piece.topology_text, piece.machine_type) == (topology, machine)
    assert piece.chips * piece.generation.jax_devices == devices
    assert piece.cores_per_host * hosts == cores and piece.jax_devices_per_host * hosts == devices


def test_every_size_of_every_generation_is_whole():
    for generation in slices.generations().values():
        for size in slices.sizes(generation):
            piece = slices.parse(f"{generation.prefix}-{size}")
            chips = 1
            for length in piece.topology:
                chips *= length
            assert chips == piece.chips <= generation.max_chips and piece.chips % piece.hosts == 0
            assert piece.chips_per_host in generation.host_chips


def test_short_names_are_those_of_google():
    assert slices.parse("v5e-16").name == "v5litepod-16"
    assert slices.parse("v7x-8").name == slices.parse("V7-8").name == "tpu7x-8"


@pytest.mark.parametrize(
    "name, says",
    [
        ("v5litepod-12", "the number counts chips. Near it: v5litepod-4: 4 chips, 4 cores, 1 host of 4 cores; v5l"),
        ("v3-12", "the number counts cores. Near it: v3-8: 4 chips, 8 cores, 1 host of 8 cores; v3-16: 8 chips"),
        ("v5litepod-512", "v5litepod-256: 256 chips, 256 cores, 64 hosts of 4 cores"),
        ("v5litpod-16", "Did you mean 'v5litepod-16'? (v5litepod-16: 16 chips, 16 cores, 4 hosts of 4 cores)"),
        ("a100", "Expected v2-N, v3-N, v4-N, v5litepod-N, v5p-N, v6e-N, tpu7x-N."),
        ("v3-0", "unknown TPU type 'v3-0'"),
        ("v3", "unknown TPU type 'v3'"),
        ("", "unknown TPU type ''"),
        ("v3-8;id", "unknown TPU type 'v3-8;id'"),
    ],
)
def test_unknown_names_are_refused_with_near_ones(name, says):
    with pytest.raises(UserError) as error:
        slices.parse(name)
    assert says in str(error.value)


def test_what_is_not_known_is_none():
    assert slices.generations()["v2"].ici_gb_per_s is None and slices.generations()["tpu7x"].ici_gb_per_s is None
    assert slices.generations()["tpu7x"].apis == (slices.COMPUTE,)


def test_prices_are_by_region_and_kind():
    piece = slices.parse("v5litepod-16")
    price = prices.find(piece, "us-west4-a", spot=True)
    assert price is not None and (price.usd, price.region, price.kind) == (0.48, "us-west4", "spot")
    assert prices.per_hour(piece, "us-west4", True).startswith("price: $7.68 per hour = 16 chips x $0.48")
    # Single hosts of v2 and v3 have prices of their own, and only in those regions.
    found = [prices.find(slices.parse(name), None, False) for name in ("v2-8", "v2-32", "v3-8")]
    assert [price and price.usd for price in found] == [1.125, 1.5, 2.0]
    assert prices.find(slices.parse("v3-8"), "us-east1", False) is None


@pytest.mark.parametrize("name, region", [("tpu7x-8", None), ("v5litepod-16", "asia-east1"), ("v6e-8", "us-west4")])
def test_an_unknown_price_is_said_to_be_unknown(name, region):
    piece = slices.parse(name)
    assert prices.find(piece, region, spot=False) is None
    assert "unknown" in prices.per_hour(piece, region, False)
    assert "--price-per-chip-hour" in prices.per_hour(piece, region, False)
    assert prices.per_hour(piece, region, False, given=3.0).startswith(f"price: ${3 * piece.chips:.2f} per hour")


def test_a_placeholder_is_no_price(monkeypatch):
    """The catalogue writes 700 where it knows none."""
    row = {"type": "v4", "region": "r", "on_demand": "700.0", "spot": "", "source": "s", "read": "d"}
    monkeypatch.setattr(prices, "read_table", lambda name: [row])
    for spot in (False, True):
        assert prices.find(slices.parse("v4-8"), None, spot) is None


def test_the_table_is_dated_sourced_and_plausible():
    rows = slices.read_table("prices.csv")
    for row in rows:
        assert datetime.date.fromisoformat(row["read"]) and row["source"]
        assert 0 < float(row["spot"]) < float(row["on_demand"]) < 20
    assert len({(row["type"], row["region"]) for row in rows}) == len(rows)


def test_the_tables_come_with_the_package():
    """And are well-formed CSV."""
    folder = pathlib.Path(launch.__file__).parent / "data"
    project = tomllib.loads((folder.parents[1] / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"] == {"launch": ["data/*.csv"]}
    for path in folder.iterdir():
        with open(path, newline="") as file:
            header, *rows = csv.reader(file)
        assert path.suffix == ".csv" and rows and all(len(row) == len(header) for row in rows), path
