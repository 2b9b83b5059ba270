"""JSON as its standard has it: read within bounds, written without NaN.

Python's reader takes more than other readers do (NaN, duplicate keys, lone surrogates), and what it
read may be too deep to be copied or written again. What is refused here is refused by no later
step.
"""

import json
import math
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from twellctl.errors import TwellError, reason, shown

MAX_BYTES = 100_000_000
MAX_DEPTH = 64
_MAX_BITS = 1023  # of a whole number: more is no float


def parse_json(content: bytes | str, *, finite: bool = True) -> Any:
    """The value in `content`; `ValueError` says what is wrong with it.

    `finite=False` lets NaN and infinity pass, for rows from which only one text is read.
    """
    text = content.decode("utf-8") if isinstance(content, bytes) else content
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep") from None
    _check(value, finite)
    return value


def read_json(path: Path, remedy: str = "copy it again") -> dict[str, Any]:
    """The JSON object in the file `path`; `TwellError` with the remedy if it holds none."""
    try:
        value = parse_json(read_file(path))
    except ValueError as error:
        raise TwellError(f"{path} is not valid JSON ({reason(error)}): {remedy}") from error
    if not isinstance(value, dict):
        raise TwellError(f"{path} holds no JSON object: {remedy}")
    return value


def read_file(path: Path, most: int = MAX_BYTES) -> bytes:
    """All of a file that is read as a whole; `TwellError` if it is a pipe, huge or unreadable."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise TwellError(f"{path} is not a regular file: give one")
        if status.st_size > most:
            raise TwellError(f"{path} has {status.st_size} bytes, more than {most}: give less")
        return path.read_bytes()
    except OSError as error:
        raise TwellError(f"{path} cannot be read: {error.strerror or error}") from error


def to_json(value: Any, **style: Any) -> str:
    """`value` as JSON that every reader takes; `ValueError` if it holds NaN or infinity."""
    return json.dumps(value, allow_nan=False, **style)


def json_text(value: Any) -> str:
    """`value` as the whole text of a file that people read, too."""
    return to_json(value, indent=2, ensure_ascii=False) + "\n"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        count = Counter(key for key, _ in pairs)
        raise ValueError(f"{shown(count.most_common(1)[0][0])} is given more than once")
    return made


def _check(value: Any, finite: bool) -> None:
    """`ValueError` for what a writer would refuse: depth, lone surrogates, infinite numbers."""
    level, depth = [value], 0
    while level:
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.keys()
                inner += item.values()
            elif isinstance(item, list):
                inner += item
            elif isinstance(item, str):
                _check_text(item)
            elif finite and isinstance(item, float) and not math.isfinite(item):
                raise ValueError("it holds a number that is not finite")
            elif finite and type(item) is int and item.bit_length() > _MAX_BITS:
                raise ValueError("it holds a number of too many digits")
        level, depth = inner, depth + 1


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        broken = text[error.start].encode("unicode_escape").decode()
        raise ValueError(f"it holds the lone surrogate {broken}") from None
