"""How a row that `twellctl write` wrote is known: it says so."""

from pathlib import Path
from typing import Any

from twellctl.files.strict_json import parse_json

WRITTEN = {"by": "twellctl write"}  # in each of its rows


def is_written(row: Any) -> bool:
    """Whether `row` of a jsonl file is one of `twellctl write`."""
    return isinstance(row, dict) and row.items() >= WRITTEN.items()


def is_written_file(path: Path) -> bool:
    """Whether the first row of `path` is, or there is none."""
    try:
        with path.open("rb") as file:
            line = file.readline()
            return not line or is_written(parse_json(line.decode("utf-8")))
    except (OSError, ValueError):
        return False
