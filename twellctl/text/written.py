"""The jsonl file of `twellctl write`: what a row of it holds, and whole lines into it.

A row has `messages`, a prompt and its answer, for everybody; and `text`, what the model read and
wrote, its thinking and its end among them, for whoever reads by the same chat template. An answer
that was cut is marked `cut`, and its text has no end.
"""

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from twellctl.files.strict_json import parse_json

WRITTEN = {"by": "twellctl write"}  # in each of its rows


def is_written(row: Any) -> bool:
    """Whether `row` of a jsonl file is one of `twellctl write`."""
    return isinstance(row, dict) and row.items() >= WRITTEN.items()


def written_row(messages: list[Any], text: str, cut: bool, tokenizer: Any) -> dict[str, Any]:
    """A row of what a model with this `tokenizer` read and wrote."""
    row = {"messages": messages, "text": text, "template": _template(tokenizer)}
    return row | {"cut": True} if cut else row


def written_text(row: Any, tokenizer: Any) -> str | None:
    """What a row of `twellctl write` holds for this `tokenizer`.

    None for other rows, and for those written by another chat template: their messages are read.
    """
    if not is_written(row) or not isinstance(row.get("text"), str):
        return None
    if "template" in row and row["template"] != _template(tokenizer):
        return None
    return row["text"]


def _template(tokenizer: Any) -> str:
    """By what a chat template is known."""
    template = getattr(tokenizer, "chat_template", None)
    return hashlib.sha256(str(template).encode(errors="replace")).hexdigest()[:16]


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
