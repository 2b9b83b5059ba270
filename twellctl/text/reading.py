"""Texts out of files and folders of them (files.py), row by row (rows.py)."""

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from twellctl.errors import LeftOut, TwellError, UsageError, usable
from twellctl.files.home import from_home
from twellctl.text.files import (
    OF_ROWS,
    PACKED,
    PIECE,
    TABLES,
    More,
    checked,
    kind_of,
    line_end,
    lines_of,
    num_table_rows,
    read_rows,
    read_txt,
    text_files,
)
from twellctl.text.rows import row_prompt, row_text
from twellctl.text.tokens import Messages

__all__ = ["estimated_text_bytes", "read_texts", "text_files"]
logger = logging.getLogger(__name__)
Held = TypeVar("Held")
_FIRST_ROWS = 256  # of a file, from which the size of its text is estimated
_PACKED = 4  # times as large is what is packed, about


def read_texts(paths: list[str], text_column: str, tokenizer: Any = None) -> Iterator[str]:
    """The texts of files and folders, in the order given, folders in the order of their names.

    A txt file is one text; jsonl, JSON arrays, parquet and Arrow hold one a row, in any of the
    forms of `row_text`. A long text comes in pieces, of which all but the first are `More`. Rows
    and files that hold no text, or cannot be read, are left out, and counted in the log. If there
    is nothing else, a `TwellError` names file and line of the first.
    """

    def texts_of(path: Path) -> Iterator[str]:
        texts = filter(None, _texts(path, text_column, tokenizer))
        if (first := next(texts, None)) is None:
            raise LeftOut(f"{path} holds no text: give a file with text, or leave it out")
        return chain([first], texts)

    for texts in usable(text_files(paths), texts_of, logger.warning, "files of text"):
        try:
            yield from texts
        except LeftOut as error:  # behind its first piece
            logger.warning("the rest of a file of text is left out: %s", error)


def read_prompts(path: str | Path) -> list[Messages]:
    """The messages up to a user's of each row of a file (`row_prompt`).

    The file is jsonl, JSON, parquet or Arrow. Rows without any, or that cannot be read, are left
    out, and counted in the log. `TwellError` if there is no other.
    """
    path = from_home(path)
    if kind_of(path) not in OF_ROWS:
        raise UsageError(
            f"{path} is not a jsonl, JSON, parquet or Arrow file: give one with prompts as rows"
        )
    found = list(_held(path, read_rows(path, ""), row_prompt))
    if not found:
        raise TwellError(f"{path} holds no prompt: give a file with some")
    return found


def _held(
    path: Path,
    rows: Iterator[tuple[str, Any]],
    read: Callable[[Any, str], Held],
) -> Iterator[Held]:
    """What `read` finds in each row. Those that are left out are counted in the log."""

    def found(row: tuple[str, Any]) -> Held:
        return read(checked(row[1]), row[0])

    return usable(rows, found, logger.warning, f"rows of {path}")


def estimated_text_bytes(paths: list[str], text_column: str, tokenizer: Any = None) -> float:
    """Bytes of all texts that `read_texts` gives, in UTF-8: by the first rows of each file."""

    def size(path: Path) -> float:
        return _text_bytes(path, text_column, tokenizer)

    return sum(usable(text_files(paths), size, lambda said: None, "files of text"))


def _texts(path: Path, text_column: str, tokenizer: Any) -> Iterator[str]:
    if kind_of(path) == ".txt":
        yield from read_txt(path)
        return

    def text_of(row: Any, where: str) -> str:
        return row_text(row, text_column, tokenizer, where)

    for text in _held(path, read_rows(path, text_column), text_of):
        yield from _pieces(text)


def _pieces(text: str) -> Iterator[str]:
    kind: type[str] = str
    while len(text) > PIECE:
        end = line_end(text, PIECE)
        yield kind(text[:end])
        text, kind = text[end:], More
    yield kind(text)


def _text_bytes(path: Path, text_column: str, tokenizer: Any) -> float:
    kind = kind_of(path)
    size = path.stat().st_size * (_PACKED if path.suffix in PACKED else 1)
    if kind == ".txt":
        return size
    if kind in TABLES:
        first = list(islice(_texts(path, text_column, tokenizer), _FIRST_ROWS))
        return num_table_rows(path) * _utf8(first) / len(first) if first else 0
    lines = [line for line in islice(lines_of(path), _FIRST_ROWS) if line.strip()]
    if not (read := sum(map(len, lines))):
        return 0
    return min(size, size * _utf8(islice(_texts(path, text_column, tokenizer), len(lines))) / read)


def _utf8(texts: Iterable[str]) -> int:
    return sum(len(text.encode("utf-8")) for text in texts)
