"""What a model's answer holds after any thinking (text/thinking.py): blocks of code, numbers.

Markdown is read by markdown-it-py. Python in blocks is read by programs.py.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from markdown_it import MarkdownIt

# ---- blocks of code


@dataclass(frozen=True)
class Block:
    """The `code` of a fence, and the first word after its backticks; "" where it is indented.

    A fence has the `lines` of the text from the first on and up to the second.
    """

    label: str
    code: str
    lines: tuple[int, int] | None


_MARKDOWN = MarkdownIt("commonmark").disable("inline")  # only blocks are looked at


def code_blocks(text: str) -> list[Block]:
    """Blocks in order, of any label, also in lists; the last fence may not be closed."""
    blocks = []
    for token in _MARKDOWN.parse(text):
        if token.type in ("fence", "code_block"):
            lines = (token.map[0], token.map[1]) if token.map and token.type == "fence" else None
            blocks.append(Block(_label(token.info), token.content, lines))
    return blocks


def _label(info: str) -> str:
    """Its first word, without the braces and dot of Pandoc: `{.python}`, `python title="a.py"`."""
    words = info.strip().lstrip("{").lstrip(".").replace("}", " ").replace(":", " ").split()
    return words[0].lower() if words else ""


# ---- numbers

_DIGITS = r"(?:\d{1,3}(?:(?:,|\{,\}|['\u2019_\u00a0\u2009\u202f])\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"""
    (?<![\w./])                                # not within a word, a version or a date
    (?P<sign>(?<![)\]}}])[-\u2212+])?               # not that of a difference
    (?:\\?[$€£¥₹]\s?)?(?P<after_money>[-\u2212])?   # money
    (?:
      \\[dt]?frac\{{(?P<over>-?\d{{1,300}})\}}\{{(?P<under>\d{{1,300}})\}}
      | (?P<digits>{_DIGITS})
        (?: [eE](?P<exponent>[-\u2212+]?\d{{1,6}})(?!\w)
          | \s?(?:\u00d7|\\times|\*|x)\s?10(?:\^|\*\*)\{{?(?P<power>[-\u2212]?\d{{1,6}})\}}?
          | \s?/\s?(?P<divisor>\d{{1,300}})(?![\d/])
        )?
    )
    (?P<percent>\s?\\?%)?
    """,
    re.VERBOSE,
)
_BOXED = re.compile(r"\\boxed\s*\{")
_HASHES = re.compile(r"^#{4}[ \t]*([^\n]*)", re.MULTILINE)
_PHRASE = re.compile(r"\banswer[*_]*\s*(?:is|are|=|:|would be|equals)[*_:\s]*", re.IGNORECASE)
_SO = re.compile(r"=|\b(?:so|thus|hence|therefore|total|altogether)\b", re.IGNORECASE)
_FEW_WORDS = re.compile(r"[^\w\n]*(?:[a-z\\{]+[^\w\n]+){0,2}[^\w\n]*", re.IGNORECASE)
_MINUS = "\N{MINUS SIGN}"
_LARGEST_POWER = 400  # of ten: more is no number that a task asks for
_MOST_DIGITS = 1000


@dataclass(frozen=True)
class Number:
    """An exact `value`; `is_percent`: it was written with a percent sign."""

    value: Fraction
    is_percent: bool = False

    def equals(self, other: "Number") -> bool:
        """Whole numbers must be equal; others may differ by a millionth. 50 % is 50 and 0.5."""
        if _are_close(self.value, other.value):
            return True
        share, whole = (self, other) if self.is_percent else (other, self)
        return share.is_percent > whole.is_percent and _are_close(share.value / 100, whole.value)


def numbers(text: str) -> Iterator[Number]:
    """All numbers of a text: signs, separators of thousands, exponents, fractions, percent."""
    for found in _NUMBER.finditer(text):
        number = _number(found)
        if number is not None:
            yield number


def answer_number(text: str) -> Number | None:
    """The number that a text gives as its answer; None if it holds none.

    That is the one in the last `\\boxed{}`, else after `####`, else after the last "answer is" or
    "Answer:", else the last one.
    """
    for part in (_boxed(text), _after_hashes(text), _after_phrase(text)):
        if part is not None and (number := _stated(part)) is not None:
            return number
    *_, last = [None, *numbers(text)]
    return last


def _stated(part: str) -> Number | None:
    """The number that a sentence states: what it comes to if it reckons, else the first one."""
    *_, conclusion = _SO.split(part)
    return next(numbers(conclusion), None) or next(numbers(part), None)


def _number(found: re.Match[str]) -> Number | None:
    if found["over"] is not None:
        under = int(found["under"])
        value = Fraction(int(found["over"]), under) if under else None
    else:
        value = _value(found)
    if value is None:
        return None
    is_negative = bool({found["sign"], found["after_money"]} & {"-", _MINUS})
    return Number(-value if is_negative else value, found["percent"] is not None)


def _value(found: re.Match[str]) -> Fraction | None:
    digits = re.sub(r"[^\d.]", "", found["digits"])
    if len(digits) > _MOST_DIGITS:
        return None
    value = Fraction(digits)
    if found["divisor"] is not None:
        divisor = int(found["divisor"])
        return value / divisor if divisor else None
    power = int((found["exponent"] or found["power"] or "0").replace(_MINUS, "-"))
    return value * Fraction(10) ** power if abs(power) <= _LARGEST_POWER else None


def _are_close(one: Fraction, other: Fraction) -> bool:
    if one == other or one.denominator == other.denominator == 1:
        return one == other
    return abs(one - other) <= max(abs(one), abs(other)) / 1_000_000


def _boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{}`."""
    starts = [match.end() for match in _BOXED.finditer(text)]
    if not starts:
        return None
    depth = 1
    for place in range(starts[-1], len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[starts[-1] : place]
    return None


def _after_hashes(text: str) -> str | None:
    """The first line that is `####` and a number, as in GSM8K; a heading goes on in words."""
    for line in _HASHES.finditer(text):
        plain = line[1].strip().strip("*")
        found = _NUMBER.match(plain)
        if found is not None and not re.match(
            r"[.):]\s*\S|\s+\w+\s+\w+\s+\w+", plain[found.end() :]
        ):
            return plain
    return None


def _after_phrase(text: str) -> str | None:
    """The sentence after the last "answer is", "Answer:" or alike that a number soon follows."""
    rest = None
    for phrase in _PHRASE.finditer(text):
        line = text[phrase.end() :].split("\n", 1)[0]
        words = _FEW_WORDS.match(line)
        if _NUMBER.match(line, words.end() if words else 0):
            rest = re.split(r"\.\s", line)[0]
    return rest
