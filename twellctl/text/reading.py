"""Texts out of files and folders of them (files.py), row by row (rows.py)."""

import logging
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from twellctl.errors import TwellError, UsageError
from twellctl.files.home import from_home
from twellctl.text.files import (
    PACKED,
    PIECE,
    More,
    kind_of,
    line_end,
    lines_of,
    read_rows,
    read_txt,
    text_files,
)
from twellctl.text.rows import PAIRS, NoText, row_text

__all__ = ["estimated_text_bytes", "read_texts", "text_files"]
logger = logging.getLogger(__name__)
_FIRST_ROWS = 256  # of a file, from which the size of its text is estimated
_PACKED = 4  # times as large is what is packed, about


def read_texts(paths: list[str], text_column: str, tokenizer: Any = None) -> Iterator[str]:
    """The texts of files and folders, in the order given, folders in the order of their names.

    A txt file is one text; jsonl, JSON arrays and parquet hold one a row, in any of the
    forms of `row_text`. A long text comes in pieces, of which all but the first are `More`. Rows
    without text are left out, and counted in the log. `TwellError` names file and line of what is
    wrong.
    """
    for path in text_files(paths):
        some = False
        for text in _texts(path, text_column, tokenizer):
            if text:
                some = True
                yield text
        if not some:
            raise TwellError(f"{path} holds no text: give a file with text, or leave it out")


def read_prompts(path: str | Path) -> list[list[dict[str, str]]]:
    """The messages up to a user's of each row of a jsonl, JSON or parquet file.

    A row has `messages`, or a question as `row_text` knows it (`prompt`, `instruction` and `input`,
    `question`, `query`); its answer is not read. `TwellError` names file and line of what is wrong.
    """
    path = from_home(path)
    if kind_of(path) not in (".jsonl", ".json", ".parquet"):
        raise UsageError(
            f"{path} is not a jsonl, JSON or parquet file: give one with prompts as rows"
        )
    found = [_asked(row, where) for where, row in read_rows(path, "")]
    if not found:
        raise TwellError(f"{path} holds no prompt: give a file with some")
    return found


def _asked(row: Any, where: str) -> list[dict[str, str]]:
    known = ("messages", *dict.fromkeys(question for question, _, _ in PAIRS))
    keys = [key for key in known if isinstance(row, dict) and key in row]
    if not keys:
        raise TwellError(f"{where} must have a prompt, an instruction, a question or messages")
    if {"messages", "prompt"} <= {*keys}:
        raise TwellError(f"{where} must have a prompt or messages, it has both")
    messages = row[keys[0]]
    if keys[0] != "messages":
        beside = (row.get(name) for question, name, _ in PAIRS if name and question == keys[0])
        parts = [messages, *filter(None, beside)]
        text = "\n\n".join(parts) if all(isinstance(part, str) for part in parts) else ""
        messages = [{"role": "user", "content": text}]
    turns = messages if isinstance(messages, list) else []
    turns = [(m.get("role"), m.get("content")) for m in turns if isinstance(m, dict)]
    texts = all(isinstance(text, str) and text.strip() for _, text in turns)
    if not turns or len(turns) < len(messages) or not texts:
        raise TwellError(f"{where} has no text in its {keys[0]}: correct or leave out this row")
    if turns[-1][0] != "user":
        raise TwellError(f"{where}: its messages must end with the user's, which is answered")
    return [{"role": role, "content": text} for role, text in turns]


def estimated_text_bytes(paths: list[str], text_column: str, tokenizer: Any = None) -> float:
    """Bytes of all texts that `read_texts` gives, in UTF-8: by the first rows of each file."""
    return sum(_text_bytes(path, text_column, tokenizer) for path in text_files(paths))


def _texts(path: Path, text_column: str, tokenizer: Any) -> Iterator[str]:
    if kind_of(path) == ".txt":
        yield from read_txt(path)
        return
    without, count, first = 0, 0, None
    for where, row in read_rows(path, text_column):
        count += 1
        try:
            text = row_text(row, text_column, tokenizer, where)
        except NoText as error:
            without, first = without + 1, first or error
            continue
        yield from _pieces(text)
    if without and without == count:
        raise TwellError(str(first))
    if without:
        logger.warning("%s: %d of %d rows hold no text and are left out", path, without, count)


def _pieces(text: str) -> Iterator[str]:
    kind = str
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
    if kind == ".parquet":
        import pyarrow.parquet

        first = list(islice(_texts(path, text_column, tokenizer), _FIRST_ROWS))
        num_rows = pyarrow.parquet.read_metadata(path).num_rows
        return num_rows * _utf8(first) / len(first) if first else 0
    lines = [line for line in islice(lines_of(path), _FIRST_ROWS) if line.strip()]
    if not (read := sum(map(len, lines))):
        return 0
    return min(size, size * _utf8(islice(_texts(path, text_column, tokenizer), len(lines))) / read)


def _utf8(texts: Iterable[str]) -> int:
    return sum(len(text.encode("utf-8")) for text in texts)
