"""Log-probabilities in OpenAI's two forms, and the densities of our own. No HTTP."""

from collections.abc import Sequence
from typing import Any

from twellctl.serving.completion import PlacedToken
from twellctl.serving.token_spelling import Spelling, TokenSpelling

_LEAST = -9999.0  # OpenAI's number for what has no chance: JSON has no infinity


def chat_logprobs(tokens: Sequence[PlacedToken], spelling: TokenSpelling) -> dict[str, Any]:
    """/v1/chat/completions: one entry a token, its alternatives inside."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        spelled = spelling(token)
        spelled_bytes = None if spelled.bytes is None else list(spelled.bytes)
        told = max(logprob, _LEAST)
        return {"token": spelled.escaped(), "logprob": told, "bytes": spelled_bytes}

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
    told: dict[str, Any] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [placed.offset for placed in tokens],
    }
    for token in (placed.token for placed in tokens):
        name = _name(spelling(token.id))
        told["tokens"].append(name)
        if token.logprob is None:  # the first of an echoed prompt
            told["token_logprobs"].append(None)
            told["top_logprobs"].append(None)
            continue
        best = {_name(spelling(other)): max(value, _LEAST) for other, value in token.top}
        told["token_logprobs"].append(max(token.logprob, _LEAST))
        told["top_logprobs"].append(best | {name: told["token_logprobs"][-1]})
    return told


def densities(tokens: Sequence[PlacedToken]) -> list[list[float]]:
    """Share of each layer's neurons that fired, `[tokens, layers]`, to six places."""
    return [[round(share, 6) for share in placed.token.densities or ()] for placed in tokens]


def _name(spelling: Spelling) -> str:
    return spelling.text if spelling.is_whole else f"bytes:{spelling.escaped()}"
