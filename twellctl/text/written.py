"""The jsonl file of `twellctl write`: what a row of it holds, and whole lines into it.

A row has `messages`, a prompt and its answer, for everybody; and `text`, what the model read and
wrote, its thinking and its end among them, for whoever reads by the same chat template. An answer
that was cut is marked `cut`, and its text has no end.

While not all rows are there, each begins with what is needed to go on (`UNFINISHED`): its number,
how many tokens it has, and what the file is made of. When all are there they are put in order.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twellctl.errors import TwellError
from twellctl.files.made_of import refuse_other
from twellctl.files.outputs import write_file
from twellctl.files.strict_json import parse_json

WRITTEN = {"by": "twellctl write"}  # in each of its rows
UNFINISHED = "unfinished"  # a key, the first one of rows while not all are there
_BEGINS = f'{{"{UNFINISHED}": '.encode()
HELD_OUT = 16  # of so many prompts the answers to one
_REMEDY = "choose another name, or replace it with --overwrite"


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
        return is_unfinished(path) or is_written(parse_json(_first_line(path)))
    except (OSError, ValueError):
        return False


def is_unfinished(path: Path) -> bool:
    """Whether rows are missing in a file of `twellctl write`."""
    line = _first_line(path)
    return not line or line.startswith(_BEGINS)


def _first_line(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.readline()


@dataclass
class Begun:
    """What an unfinished file has: the numbers of its rows, their tokens, how many were cut.

    `size` are the bytes of whole rows; the writing of what follows was cut short.
    """

    numbers: set[int] = field(default_factory=set)
    tokens: int = 0
    cut: int = 0
    size: int = 0


def begun_rows(path: Path, made_of: dict[str, Any]) -> Begun:
    """What there is of a file that is `made_of` these parts.

    `TwellError` if it is made of others, or damaged.
    """
    begun = Begun()
    for size, row in _unfinished_rows(path):
        known = row[UNFINISHED]
        refuse_other(path, known["made_of"], made_of, _REMEDY)
        if known["number"] in begun.numbers:
            raise TwellError(f"{path} has answer {known['number']} twice: {_REMEDY}")
        begun.numbers.add(known["number"])
        begun.tokens += known["tokens"]
        begun.cut += bool(row.get("cut"))
        begun.size += size
    return begun


def _unfinished_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(bytes, the row) of each whole line; `TwellError` for one that is none."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                row = parse_json(line)
                known = row[UNFINISHED]
                if not isinstance(known["made_of"], dict) or known["number"] + known["tokens"] < 1:
                    raise ValueError
            except (ValueError, TypeError, KeyError):
                raise TwellError(f"{path}:{number} is damaged: {_REMEDY}") from None
            yield len(line), row


def finish(path: Path, new: Path) -> None:
    """Put the rows of `path`, all of which are there, in their order, by way of the file `new`."""
    places, end = {}, 0
    for size, row in _unfinished_rows(path):
        places[row[UNFINISHED]["number"]], end = end, end + size
    with path.open("rb") as file, new.open("wb") as ordered:
        for number in sorted(places):
            file.seek(places[number])
            row = parse_json(file.readline())
            ordered.write(_line({key: row[key] for key in row if key != UNFINISHED}))
    new.replace(path)


def hold_out(path: Path, held_out: Path) -> None:
    """Move the answers to 1 of `HELD_OUT` prompts from the finished file `path` to `held_out`.

    Where it was killed in between, the rest is moved. `TwellError` for answers to one prompt alone.
    """
    rows = path.read_text(encoding="utf-8").split("\n")[:-1]
    prompts: dict[str, int] = {}
    for row in rows:
        prompts.setdefault(_prompt_in(row), len(prompts))
    held = [row for row in rows if prompts[_prompt_in(row)] % HELD_OUT == 0]
    kept = [row for row in rows if prompts[_prompt_in(row)] % HELD_OUT]
    if not kept and not held_out.exists():
        raise TwellError(
            f"{path} holds answers to one prompt, but some prompts are held out: give two or more"
        )
    if not held_out.exists():
        write_file(held_out, "".join(f"{row}\n" for row in held))
    elif held_out.read_text(encoding="utf-8").split("\n")[:-1] != held:
        return
    write_file(path, "".join(f"{row}\n" for row in kept))


def _prompt_in(line: str) -> str:
    return json.dumps(parse_json(line)["messages"][:-1])


def _line(row: dict[str, Any]) -> bytes:
    return (json.dumps(row, ensure_ascii=False) + "\n").encode(errors="replace")


class WrittenFile:
    """A jsonl file open for rows; each is there whole or not at all.

    A context manager. `OSError` for a row that could not be written; those before it, the first
    `size` bytes among them, stay.
    """

    def __init__(self, descriptor: int, size: int = 0):
        self._file, self._size = descriptor, size

    def __enter__(self) -> "WrittenFile":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)

    def add(self, row: dict[str, Any], unfinished: dict[str, Any]) -> None:
        """Write `row`, marked as this command's, and as one after which others follow."""
        line = _line({UNFINISHED: unfinished} | row | WRITTEN)
        done = 0
        try:
            while done < len(line):
                done += os.write(self._file, line[done:])
        except BaseException:  # Ctrl-C, too
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise
        self._size += len(line)
