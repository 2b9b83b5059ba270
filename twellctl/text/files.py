"""Text files: which there are, and their rows one by one, in bounded memory but for JSON arrays.

What cannot be read ends in a `TwellError` that names file and line; of a row that is `LeftOut`, so
that others are read.
"""

import codecs
import contextlib
import os
import re
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import IO, Any

from twellctl.errors import LeftOut, TwellError, UsageError, reason
from twellctl.files.home import from_home
from twellctl.files.strict_json import parse_json
from twellctl.text.rows import COLUMNS, some

PACKED = (".gz", ".bz2", ".zst", ".xz")
TABLES = (".parquet", ".arrow")  # which are not packed once more
OF_ROWS = (".jsonl", ".json", *TABLES)
SUFFIXES = (*OF_ROWS, ".txt")
# what data sets and models have that is no text of theirs
_NO_TEXT = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
_NO_TEXT |= {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
_NO_TEXT |= {"special_tokens_map.json", "vocab.json", "package.json", "requirements.txt"}
PIECE = 1 << 20  # characters of a text at a time
_READ_BYTES = 1 << 16  # of a file at a time
_LONGEST_ROW = 64 << 20  # bytes
_ROWS_AT_ONCE = 64  # of a table: each may be large, however small the file is


class More(str):
    """A text that goes on from the one before it."""

    __slots__ = ()


def kind_of(path: Path) -> str:
    """The suffix that says what a file holds, also of one that is packed; "" for what is none."""
    inner = path.with_suffix("") if path.suffix in PACKED else path
    suffix = inner.suffix
    return "" if path.suffix in PACKED and suffix in TABLES else suffix


def kind_and_path(entry: str) -> tuple[str, str]:
    """NAME and FILE of NAME=FILE; a path alone is named by its stem, a folder by its name."""
    named = re.fullmatch(r"([^/=]+)=(.+)", entry)
    if named and not Path(entry).exists():
        return named[1], named[2]
    whole = Path(os.path.abspath(entry))
    return (whole.name if whole.is_dir() else whole.stem), entry


def text_files(paths: list[str]) -> list[Path]:
    """The files that `paths`, files and folders, stand for; one that is no text is refused.

    In a folder what has another suffix, is hidden, or describes data or a model is passed over.
    """
    files: list[Path] = []
    for name in paths:
        if not name:
            raise UsageError("an empty name was given for a text: name a file or folder")
        path = from_home(name)
        if path.is_dir():
            found = sorted(p for p in _files_below(path) if kind_of(p) in SUFFIXES)
            if not found:
                raise TwellError(f"{path} holds no {', '.join(SUFFIXES)} file")
            files += found
        elif not path.exists():
            raise TwellError(f"{path} does not exist: give a text file or a folder of them")
        elif kind_of(path) not in SUFFIXES:
            raise TwellError(
                f"{path} is none of {', '.join(SUFFIXES)}, nor one of them as {' or '.join(PACKED)}"
                ": rename or convert it"
            )
        elif not path.is_file():
            raise TwellError(
                f"{path} is not a regular file: write its text to one, it is read twice"
            )
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
        folders[:] = [name for name in folders if not name.startswith((".", "__MACOSX"))]
        kept = (name for name in names if not name.startswith(".") and name not in _NO_TEXT)
        yield from (path for name in kept if (path := Path(here, name)).is_file())


def read_txt(path: Path) -> Iterator[str]:
    """The text of a txt file, its lines ended as in Unix, in pieces that end at lines' ends."""
    held, kind, place = "", str, 0
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    for block in chain(_blocks(path), [b""]):
        try:
            held += decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise _no_utf8(str(path), place + error.start) from error
        place += len(block)
        while len(held) >= PIECE:
            end = line_end(held, PIECE)
            yield kind(held[:end].replace("\r\n", "\n"))
            held, kind = held[end:], More
    if held:
        yield kind(held.replace("\r\n", "\n"))


def line_end(text: str, most: int) -> int:
    """Where to cut `text` in at most `most` characters: after a line, if one ends there."""
    end = text.rfind("\n", most // 2, most) + 1
    return end or most - (text[most - 1 : most] == "\r")


def read_rows(path: Path, text_column: str | None) -> Iterator[tuple[str, Any]]:
    """(where it stands, the row) of each row of a jsonl, JSON, parquet or Arrow file.

    A row that is no JSON is the `LeftOut` that says so, which `checked` raises.
    Of a table only the column `text_column` is read, or those of `COLUMNS` if it has none of that
    name; None: all.
    """
    kind = kind_of(path)
    if path.exists() and not path.is_file():
        raise TwellError(f"{path} is not a regular file: write its rows to one")
    if kind in TABLES:
        yield from _read_table(path, text_column)
        return
    if kind == ".json" and _begins_array(path):
        yield from _read_array(path)
        return
    for number, line in enumerate(lines_of(path), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        yield where, _row_of(line, where)


def _row_of(line: bytes, where: str) -> Any:
    try:
        return parse_json(_decoded(line, where), finite=False)
    except ValueError as error:
        said = f"{where} is not valid JSON ({reason(error)}): each line must hold one object"
        return LeftOut(said)
    except LeftOut as error:
        return error


def checked(row: Any) -> Any:
    """A row of `read_rows`; raises it if it is none."""
    if isinstance(row, LeftOut):
        raise row
    return row


def lines_of(path: Path) -> Iterator[bytes]:
    """With their ends; `TwellError` for one of more than 64 MiB."""
    held = b""
    for block in _blocks(path):
        *lines, held = (held + block).split(b"\n")
        yield from (line + b"\n" for line in lines)
        if len(held) > _LONGEST_ROW:
            raise TwellError(
                f"{path} holds a line of more than {_LONGEST_ROW >> 20} MiB: each line must hold "
                "one object"
            )
    if held:
        yield held


def _begins_array(path: Path) -> bool:
    first = next(_blocks(path), b"").removeprefix(codecs.BOM_UTF8)
    return first.lstrip().startswith(b"[")


def _read_array(path: Path) -> Iterator[tuple[str, Any]]:
    """The entries of a file that is one JSON array, which is read as a whole."""
    try:
        rows = parse_json(_decoded(b"".join(_blocks(path)), str(path)), finite=False)
    except ValueError as error:
        raise TwellError(
            f"{path} is not valid JSON ({reason(error)}): correct it, or fetch it again"
        ) from error
    yield from ((f"{path}, entry {number}", row) for number, row in enumerate(rows))


def num_table_rows(path: Path) -> int:
    """How many rows a parquet or Arrow file has."""
    with _table_errors(path), _opened_table(path) as (_, batches):
        return sum(batch.num_rows for batch in batches([]))


def _read_table(path: Path, text_column: str | None) -> Iterator[tuple[str, Any]]:
    with _table_errors(path), _opened_table(path) as (names, batches):
        wanted = _wanted(path, names, text_column)
        rows = chain.from_iterable(batch.to_pylist() for batch in batches(wanted))
        for number, row in enumerate(rows):
            yield f"{path}, row {number}", row


def _wanted(path: Path, names: list[str], text_column: str | None) -> list[str]:
    """Those of a table's columns, `names`, that `read_rows` reads; `TwellError` if it has none."""
    if text_column is None:
        return names
    wanted = [text_column] if text_column in names else [n for n in COLUMNS if n in names]
    if not wanted and not text_column:
        raise TwellError(f"{path} has no column of prompts, only {some(names)}: rename one")
    if not wanted:
        raise TwellError(
            f"{path} has no column {text_column!r}, only {some(names)}: see --text-column"
        )
    return wanted


@contextlib.contextmanager
def _table_errors(path: Path) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        kind = "parquet" if kind_of(path) == ".parquet" else "Arrow"
        raise TwellError(f"{path} is not a readable {kind} file: {reason(error)}") from error


@contextlib.contextmanager
def _opened_table(path: Path) -> Iterator[tuple[list[str], Callable[[list[str]], Iterator[Any]]]]:
    """(names of the columns, what gives some columns of all rows, a few rows at a time)."""
    import pyarrow
    import pyarrow.parquet

    if kind_of(path) == ".parquet":
        with pyarrow.parquet.ParquetFile(path) as file:
            yield (
                file.schema_arrow.names,
                lambda wanted: file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=wanted),
            )
        return
    with pyarrow.memory_map(str(path)) as stored, pyarrow.ipc.open_stream(stored) as stream:
        yield stream.schema.names, lambda wanted: _batches(stream, wanted)


def _batches(stream: Any, wanted: list[str]) -> Iterator[Any]:
    """Of an Arrow file as the datasets library saves one."""
    for batch in stream:
        chosen = batch.select(wanted)
        for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
            yield chosen.slice(start, _ROWS_AT_ONCE)


def _blocks(path: Path) -> Iterator[bytes]:
    """The content of a file, unpacked. It is open only while some is read: there may be more files
    than may be open; one that is packed stays open."""
    try:
        if path.suffix in PACKED:
            with _unpacked(path) as file:
                while block := file.read(_READ_BYTES):
                    yield block
            return
        place = 0
        while True:
            with path.open("rb") as file:
                file.seek(place)
                block = file.read(_READ_BYTES)
            if not block:
                return
            place += len(block)
            yield block
    except (OSError, EOFError) as error:
        said = getattr(error, "strerror", None) or reason(error)
        raise TwellError(f"{path} cannot be read: {said}") from error


def _unpacked(path: Path) -> IO[bytes]:
    if path.suffix == ".xz":
        import lzma

        return lzma.open(path)
    import pyarrow

    names = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
    return pyarrow.input_stream(str(path), compression=names[path.suffix])


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        raise _no_utf8(where, error.start) from error


def _no_utf8(where: str, place: int) -> LeftOut:
    return LeftOut(f"{where} is not valid UTF-8 (byte {place}): convert it with 'iconv -t utf-8'")
