"""Texts out of files and folders of them (files.py), row by row (rows.py)."""

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from twellctl.errors import TwellError, UsageError
from twellctl.files.home import from_home
from twellctl.text.files import (
    OF_ROWS,
    PACKED,
    PIECE,
    TABLES,
    More,
    kind_of,
    line_end,
    lines_of,
    num_table_rows,
    read_rows,
    read_txt,
    text_files,
)
from twellctl.text.rows import NoText, row_prompt, row_text
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
    without text are left out, and counted in the log. `TwellError` names file and line of what is
    wrong, and a file without any text.
    """
    for path in text_files(paths):
        some = False
        for text in _texts(path, text_column, tokenizer):
            if text:
                some = True
                yield text
        if not some:
            raise TwellError(f"{path} holds no text: give a file with text, or leave it out")


def read_prompts(path: str | Path) -> list[Messages]:
    """The messages up to a user's of each row of a file (`row_prompt`).

    The file is jsonl, JSON, parquet or Arrow. Rows without any are left out, and counted in the
    log. `TwellError` names file and line of what is wrong.
    """
    path = from_home(path)
    if kind_of(path) not in OF_ROWS:
        raise UsageError(
            f"{path} is not a jsonl, JSON, parquet or Arrow file: give one with prompts as rows"
        )
    found = list(_held(path, read_rows(path, ""), row_prompt, "prompt"))
    if not found:
        raise TwellError(f"{path} holds no prompt: give a file with some")
    return found


def _held(
    path: Path,
    rows: Iterator[tuple[str, Any]],
    read: Callable[[Any, str], Held],
    what: str,
) -> Iterator[Held]:
    """What `read` finds in each row. Rows that hold none are counted in the log.

    If no row holds any, the first one's reason is the `TwellError`.
    """
    without, count, first = 0, 0, None
    for where, row in rows:
        count += 1
        try:
            yield read(row, where)
        except NoText as error:
            without, first = without + 1, first or error
    if without and without == count:
        raise TwellError(str(first))
    if without:
        logger.warning("%s: %d of %d rows hold no %s and are left out", path, without, count, what)


def estimated_text_bytes(paths: list[str], text_column: str, tokenizer: Any = None) -> float:
    """Bytes of all texts that `read_texts` gives, in UTF-8: by the first rows of each file."""
    return sum(_text_bytes(path, text_column, tokenizer) for path in text_files(paths))


def _texts(path: Path, text_column: str, tokenizer: Any) -> Iterator[str]:
    if kind_of(path) == ".txt":
        yield from read_txt(path)
        return

    def text_of(row: Any, where: str) -> str:
        return row_text(row, text_column, tokenizer, where)

    for text in _held(path, read_rows(path, text_column), text_of, "text"):
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
