"""One completion: the engine's tokens as text, until an end token, a stop string or the budget.

No torch, no HTTP.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from twellctl.serving.engine import Engine, Sampling
from twellctl.serving.text_tokens import Detokenizer, StopStrings


@dataclass(frozen=True)
class Piece:
    """Text that is certain now (may be empty), the tokens read so far, why it ended if it did."""

    text: str
    num_tokens: int
    finish_reason: str | None = None  # "stop", "length"


async def complete(
    engine: Engine,
    detokenizer: Detokenizer,
    stops: StopStrings,
    prompt: Sequence[int],
    sampling: Sampling,
) -> AsyncGenerator[Piece, None]:
    """The pieces of one completion; only the last one has a finish reason. Raises `EngineError`.

    A character that the token budget cut in half is left out.
    """
    num_tokens = 0
    async with aclosing(engine.generate(prompt, sampling)) as tokens:
        async for token in tokens:
            num_tokens += 1
            ended = token.id in engine.eos_tokens
            text, stopped = stops.add(detokenizer.rest() if ended else detokenizer.add(token.id))
            if stopped or ended:
                yield Piece(text + ("" if stopped else stops.rest()), num_tokens, "stop")
                return
            yield Piece(text, num_tokens)
    yield Piece(stops.rest(), num_tokens, "length")
