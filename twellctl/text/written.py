"""The jsonl file of `twellctl write`: how a row of it is known, and whole lines into it."""

import contextlib
import json
import os
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


class WrittenFile:
    """A jsonl file open for rows; each is there whole or not at all.

    A context manager. `OSError` for a row that could not be written; those before it stay.
    """

    def __init__(self, descriptor: int):
        self._file, self._size = descriptor, 0

    def __enter__(self) -> "WrittenFile":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)

    def add(self, row: dict[str, Any]) -> None:
        """Write `row`, marked as this command's."""
        line = (json.dumps(row | WRITTEN, ensure_ascii=False) + "\n").encode(errors="replace")
        done = 0
        try:
            while done < len(line):
                done += os.write(self._file, line[done:])
        except BaseException:  # Ctrl-C, too
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise
        self._size += len(line)
