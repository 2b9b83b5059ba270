"""What this tool cannot take, in one line: what is wrong, what was seen, what to do."""

import re
import reprlib
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")
_LONGEST = 1000  # characters of a message: what others wrote may be of any length
_SURROGATE = re.compile("[\ud800-\udfff]")  # what a name that is not UTF-8 has in Python
_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = _shown.maxlong = 80


class TwellError(Exception):
    """A failure the user can act on, in one line; the command line prints it and exits 1.

    The message is kept to one line of bounded length, whatever names and values went into it.
    """

    exit_code = 1
    of_one_process = False  # whether of several that run together no other raises it

    def __init__(self, message: str):
        super().__init__(bounded(printable(message)))


class UsageError(TwellError):
    """The call itself is wrong (a flag's value, two flags that exclude each other); exits 2."""

    exit_code = 2


class LeftOut(TwellError):
    """One of several rows, prompts, questions or files cannot be used; the others still can."""


def usable(
    items: Iterable[Item], read: Callable[[Item], Made], say: Callable[[str], None], what: str
) -> Iterator[Made]:
    """What `read` makes of each of `items`, without those for which it raises `LeftOut`.

    These are counted in one line to `say`, with the first one's reason; `what` they are. If there
    is no other, the first one's error is raised.
    """
    num_out = count = 0
    first: LeftOut | None = None
    try:
        for item in items:
            count += 1
            try:
                made = read(item)
            except LeftOut as error:
                num_out, first = num_out + 1, first or error
            else:
                yield made
    finally:  # also where the rest is not wanted
        if first is not None and num_out < count:
            say(f"{num_out} of {count} {what} are left out; the first: {first}")
    if first is not None and num_out == count:
        raise first


def reason(error: BaseException) -> str:
    """The message of another library's error on one line; its type if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


def first_line(error: BaseException) -> str:
    """The first line of an error's message, which a trace may follow; its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def shown(value: object) -> str:
    """A value for a message: its repr, bounded however large or deep the value is."""
    return _shown.repr(value)


def printable(text: str) -> str:
    """`text` with line breaks, control characters and lone surrogates escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def counted(number: int, noun: str) -> str:
    """ "1 token", "2 tokens"."""
    return f"{number} {noun}" + "s" * (number != 1)


def encodable(text: str, backslash: str = "\\") -> str:
    """`text` with lone surrogates, which UTF-8 lacks, written out as \\udce9 is."""
    return _SURROGATE.sub(lambda lone: f"{backslash}u{ord(lone[0]):x}", text)


def bounded(text: str, longest: int = _LONGEST) -> str:
    """`text`, without its middle if it is long: what is wrong and what to do are at its ends."""
    if len(text) <= longest:
        return text
    return f"{text[: longest // 2]} ... {text[-longest // 3 :]}"
