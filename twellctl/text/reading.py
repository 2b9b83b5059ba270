"""Texts out of files: jsonl, txt and parquet, or folders of them.

What cannot be read ends in a `TwellError` that names file and line.
"""

import codecs
import os
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from twellctl.errors import TwellError, UsageError, bounded, reason, shown
from twellctl.files.strict_json import parse_json
from twellctl.text.tokens import chat_text
from twellctl.text.written import is_written

SUFFIXES = (".jsonl", ".json", ".txt", ".parquet")
_FIRST_ROWS = 256  # of a file, from which the size of its text is estimated
_READ_BYTES = 1 << 16  # of a jsonl file at a time


def read_texts(paths: list[str], text_column: str, tokenizer: Any = None) -> Iterator[str]:
    """The texts of files and folders, in the order given, folders in the order of their names.

    A txt file is one text, its lines ended as in Unix; jsonl and parquet hold one a row in
    `text_column`, and a row with `messages` goes through the chat template of `tokenizer`. `text`
    that `twellctl write` wrote is taken whatever the column is called. `TwellError` names file and
    line of what is wrong.
    """
    for path in text_files(paths):
        some = False
        for text in _READERS[path.suffix](path, text_column, tokenizer):
            if text:
                some = True
                yield text
        if not some:
            raise TwellError(f"{path} holds no text: give a file with text, or leave it out")


def read_prompts(path: str | Path) -> list[list[dict[str, str]]]:
    """The messages up to a user's of each line of a jsonl file: `prompt`, a text, or `messages`.

    `TwellError` names file and line of what is wrong.
    """
    if Path(path).suffix not in (".jsonl", ".json"):
        raise UsageError(f"{path} is no .jsonl file: give one whose lines have a prompt")
    found = [_messages(row, where) for where, row in _jsonl_rows(Path(path))]
    if not found:
        raise TwellError(f"{path} holds no prompt: give a file with some")
    return found


def _messages(row: Any, where: str) -> list[dict[str, str]]:
    keys = [key for key in ("prompt", "messages") if isinstance(row, dict) and key in row]
    if len(keys) != 1:
        has = "both" if keys else "neither"
        raise TwellError(f"{where} must have a prompt or messages, it has {has}")
    messages = row[keys[0]]
    if keys == ["prompt"]:
        messages = [{"role": "user", "content": messages}]
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
    return sum(
        _SIZES[path.suffix](path, _READERS[path.suffix](path, text_column, tokenizer))
        for path in text_files(paths)
    )


def text_files(paths: list[str]) -> list[Path]:
    """The files that `paths`, files and folders, stand for; one that is no text is refused."""
    files: list[Path] = []
    for name in paths:
        if not name:
            raise UsageError("an empty name was given for a text: name a file or folder")
        path = Path(name)
        if path.is_dir():
            found = sorted(p for p in _files_below(path) if p.suffix in SUFFIXES)
            if not found:
                raise TwellError(f"{path} holds no {', '.join(SUFFIXES)} file")
            files += found
        elif not path.exists():
            raise TwellError(f"{path} does not exist: give a text file or a folder of them")
        elif path.suffix not in SUFFIXES:
            raise TwellError(f"{path} is none of {', '.join(SUFFIXES)}: rename or convert it")
        elif not path.is_file():
            raise TwellError(f"{path} is no regular file: write its text to one, it is read twice")
        else:
            files.append(path)
    return files


def _files_below(folder: Path) -> Iterator[Path]:
    """Also of folders that links lead to; `TwellError` for one that cannot be read."""

    def refuse(error: OSError) -> None:
        raise TwellError(f"{error.filename} cannot be read: {error.strerror}")

    seen = set()
    for here, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        if (real := os.path.realpath(here)) in seen:  # a link leads back
            folders.clear()
            continue
        seen.add(real)
        yield from (path for name in names if (path := Path(here, name)).is_file())


def _read_txt(path: Path, text_column: str, tokenizer: Any) -> Iterator[str]:
    yield _decoded(_bytes(path), str(path)).replace("\r\n", "\n")


def _read_jsonl(path: Path, text_column: str, tokenizer: Any) -> Iterator[str]:
    for where, row in _jsonl_rows(path):
        yield _row_text(row, text_column, tokenizer, where)


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(file and line, the value there), but of empty lines."""
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            yield where, parse_json(_decoded(line, where), finite=False)
        except ValueError as error:
            raise TwellError(
                f"{where} is not valid JSON ({reason(error)}): each line must hold one object"
            ) from error


def _lines(path: Path) -> Iterator[bytes]:
    """The file is open only while some are read: there may be more files than may be open."""
    place = 0
    while lines := _some_lines(path, place):
        place += sum(map(len, lines))
        yield from lines


def _some_lines(path: Path, place: int) -> list[bytes]:
    try:
        with path.open("rb") as file:
            file.seek(place)
            return file.readlines(_READ_BYTES)
    except OSError as error:
        raise TwellError(f"{path} cannot be read: {error.strerror or error}") from error


def _read_parquet(path: Path, text_column: str, tokenizer: Any) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = file.schema_arrow.names
        wanted = [name for name in (text_column, "messages") if name in names]
        if not wanted:
            raise TwellError(
                f"{path} has no column {shown(text_column)}, only {_some(names)}: see --text-column"
            )
        batches = file.iter_batches(batch_size=1024, columns=wanted[:1])
        rows = chain.from_iterable(batch.to_pylist() for batch in batches)
        for number, row in enumerate(rows):
            yield _row_text(row, text_column, tokenizer, f"{path}, row {number}")
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise TwellError(f"{path} is no readable parquet file: {reason(error)}") from error


_READERS = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".json": _read_jsonl,
    ".parquet": _read_parquet,
}


def _jsonl_bytes(path: Path, texts: Iterator[str]) -> float:
    lines = [line for line in islice(_lines(path), _FIRST_ROWS) if line.strip()]
    size = sum(map(len, lines))
    return path.stat().st_size * _utf8(islice(texts, len(lines))) / size if size else 0


def _parquet_bytes(path: Path, texts: Iterator[str]) -> float:
    import pyarrow.parquet

    first = list(islice(texts, _FIRST_ROWS))  # says what is wrong, if the file cannot be read
    num_rows = pyarrow.parquet.read_metadata(path).num_rows
    return num_rows * _utf8(first) / len(first) if first else 0


def _utf8(texts: Iterable[str]) -> int:
    return sum(len(text.encode("utf-8")) for text in texts)


_SIZES = {
    ".txt": lambda path, texts: path.stat().st_size,
    ".jsonl": _jsonl_bytes,
    ".json": _jsonl_bytes,
    ".parquet": _parquet_bytes,
}


def _row_text(row: Any, text_column: str, tokenizer: Any, where: str) -> str:
    if isinstance(row, dict) and isinstance(row.get(text_column), str):
        return row[text_column]
    if isinstance(row, dict) and isinstance(row.get("messages"), list):
        return _chat_text(row["messages"], tokenizer, where)
    if is_written(row) and isinstance(row.get("text"), str):
        return row["text"]
    if isinstance(row, dict) and text_column in row:
        raise TwellError(
            f"{where}: {shown(text_column)} must be a text, got {shown(row[text_column])}: "
            "correct or leave out this row"
        )
    if not isinstance(row, dict):
        raise TwellError(f"{where} is {shown(row)}: each line must hold one object")
    raise TwellError(
        f"{where} has no text in {shown(text_column)}, only {_some(row)}: see --text-column"
    )


def _some(names: Iterable[str]) -> str:
    """The first of `names`, which others chose."""
    return bounded(", ".join(islice(names, 20)), 200)


def _chat_text(messages: list, tokenizer: Any, where: str) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise TwellError(f"{where} holds messages, but the tokenizer has no chat template")
    if not all(isinstance(message, dict) for message in messages):
        raise TwellError(f"{where}: messages must be objects: correct or leave out this row")
    try:
        return chat_text(tokenizer, messages, opens_answer=False)
    except ValueError as error:
        raise TwellError(f"{where}: {error}; correct or leave out this row") from error


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TwellError(f"{path} cannot be read: {error.strerror or error}") from error


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        raise TwellError(
            f"{where} is not valid UTF-8 (byte {error.start}): convert it with 'iconv -t utf-8'"
        ) from error
