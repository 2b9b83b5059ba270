"""Log-probabilities in OpenAI's two forms, with single tokens as text and bytes; our own fields.

No torch, no HTTP.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from twellctl.decoding.engine import Token
from twellctl.serving.completion import PlacedToken

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNDECODED = "\N{REPLACEMENT CHARACTER}"
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # sentencepiece's spelling of one byte


@dataclass(frozen=True)
class Spelling:
    """A token's text and its bytes; None if they are part of a character and unknown."""

    text: str
    bytes: bytes | None

    @property
    def is_whole(self) -> bool:
        """Whether the token is whole characters."""
        return self.bytes is not None and self.text.encode() == self.bytes

    def escaped(self) -> str:
        r"""The text; for parts of a character their bytes, as `\xe2\x80`."""
        if self.is_whole or self.bytes is None:
            return self.text
        return "".join(f"\\x{byte:02x}" for byte in self.bytes)


class TokenSpelling:
    """The spelling of every token of a tokenizer, as it stands within a text; remembered."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        self._tokenizer = tokenizer
        # some tokenizers drop a leading space: nothing is spelled at the beginning of a text
        self._before = tokenizer.encode("a", add_special_tokens=False)
        self._num_before = len(self._decode([]))
        self._known: dict[int, Spelling] = {}

    def __call__(self, token: int) -> Spelling:
        if token not in self._known:
            text = self._decode([token])[self._num_before :]
            is_whole = _UNDECODED not in text
            spelled = text.encode() if is_whole else self._bytes(token, text)
            self._known[token] = Spelling(text, spelled)
        return self._known[token]

    def _bytes(self, token: int, text: str) -> bytes | None:
        name = self._tokenizer.convert_ids_to_tokens(token)
        if fallback := _BYTE_FALLBACK.fullmatch(name):
            return bytes([int(fallback[1], 16)])
        letters = _byte_letters()
        if not all(letter in letters for letter in name):
            return None
        found = bytes(letters[letter] for letter in name)
        return found if found.decode(errors="replace") == text else None

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(
            [*self._before, *tokens], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


@cache
def _byte_letters() -> dict[str, int]:
    """The letter that a byte-level tokenizer writes for each byte that UTF-8 can hold."""
    from tokenizers.pre_tokenizers import ByteLevel

    # every first byte of two, three and four, and every byte that can follow
    points = [*range(0x900), *range(0x1000, 0x10000, 0x1000), *range(0x10000, 0x110000, 0x10000)]
    text = "".join(map(chr, points))
    ((letters, _),) = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return dict(zip(letters, text.encode(), strict=True))


_LEAST = -9999.0  # OpenAI's number for what has no chance: JSON has no infinity


def chat_logprobs(tokens: Sequence[PlacedToken], spelling: TokenSpelling) -> dict[str, Any]:
    """/v1/chat/completions: one entry a token, the end token's too, its alternatives inside."""

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        spelled = spelling(token)
        return {
            "token": spelled.escaped(),
            "logprob": _finite(logprob),
            "bytes": None if spelled.bytes is None else list(spelled.bytes),
        }

    content = [
        entry(placed.token.id, placed.token.logprob)
        | {"top_logprobs": [entry(*other) for other in placed.token.top]}
        for placed in tokens
    ]
    return {"content": content, "refusal": None}


def text_logprobs(tokens: Sequence[PlacedToken], spelling: TokenSpelling) -> dict[str, Any]:
    """/v1/completions: four lists side by side; offsets are in characters of the choice's text.

    The chosen token is always among its alternatives, as their last if it is none of the best.
    """

    def alternatives(token: Token) -> dict[str, float | None] | None:
        if token.logprob is None:
            return None
        best = {_name(spelling(other)): _finite(logprob) for other, logprob in token.top}
        return best | {_name(spelling(token.id)): _finite(token.logprob)}

    return {
        "tokens": [_name(spelling(placed.token.id)) for placed in tokens],
        "token_logprobs": [_finite(placed.token.logprob) for placed in tokens],
        "top_logprobs": [alternatives(placed.token) for placed in tokens],
        "text_offset": [placed.offset for placed in tokens],
    }


def _finite(logprob: float | None) -> float | None:
    """As JSON has it; None: of the first token of an echoed prompt."""
    return None if logprob is None else max(logprob, _LEAST)


def densities(tokens: Sequence[Token]) -> list[list[float]]:
    """Share of each layer's neurons that fired, `[tokens, layers]`, to six places."""
    return [[round(share, 6) for share in token.densities or ()] for token in tokens]


def drafters(tokens: Sequence[Token]) -> list[str | None]:
    """Who drafted each token; None: the model wrote it in a pass of its own."""
    return [token.draft.drafter if token.draft and token.draft.kept else None for token in tokens]


def _name(spelling: Spelling) -> str:
    return spelling.text if spelling.is_whole else f"bytes:{spelling.escaped()}"
