"""A picture, and the numbers and versions that it was made from beside it."""

from __future__ import annotations

import csv
import json
import pathlib
from typing import Any

from podracer import plot
from podracer.errors import UserError


def write(out: pathlib.Path, rows: list[dict[str, Any]], content: dict[str, Any], figure: Any) -> None:
    """Write the figure, its rows as .csv and what one must know to repeat it as .json; say the names.

    Raises:
      UserError: one of the files cannot be written.
    """
    table, facts = out.with_suffix(".csv"), out.with_suffix(".json")
    plot.save(figure, out)
    try:
        with open(table, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        facts.write_text(json.dumps(content, indent=2, default=str) + "\n")
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror}. Choose another --out.") from error
    print(f"{out}, {table}, {facts}")
