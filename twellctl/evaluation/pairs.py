"""Two models' answers to one prompt, side by side. No torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twellctl.evaluation.answers import Answer


@dataclass(frozen=True)
class Pair:
    """Both answers to `prompt`: the `common` text, and how each model continues after it.

    The first `tokens` tokens are the same; `agrees`: all are. `repeats`: which of the two, the
    original and the sparse model, end in a loop. `ended`: which ended.
    """

    prompt: str
    common: str
    rest: tuple[str, str]
    tokens: int
    agrees: bool
    ended: tuple[bool, bool]
    repeats: tuple[bool, bool]


def pair_of(prompt: str, one: "Answer", other: "Answer") -> Pair:
    """Of the original's answer and the other model's."""
    common = common_words(one.text, other.text)
    return Pair(
        prompt=prompt,
        common=common,
        rest=(one.text[len(common) :], other.text[len(common) :]),
        tokens=one.agreeing(other),
        agrees=one.tokens == other.tokens,
        ended=(one.ended, other.ended),
        repeats=(one.repeats, other.repeats),
    )


def common_words(one: str, other: str) -> str:
    """The whole words with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    size = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
    while size and one != other and not one[size - 1].isspace():
        size -= 1
    return one[:size]
