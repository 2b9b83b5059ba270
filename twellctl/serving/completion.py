"""One completion: the engine's tokens as text, until an end token, a stop string or the budget;
several of them read together.

No torch, no HTTP.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from twellctl.decoding.engine import Engine, Sampling, Token
from twellctl.text.tokens import Detokenizer, StopStrings


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """A token, and where its text begins in the completion's (in characters).

    `unseen`: its text is not in the completion's. That is the end token, and what a stop string
    cut off; they stand at the end of the text.
    """

    token: Token
    offset: int
    unseen: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool; `arguments` is JSON, as the model wrote it."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Piece:
    """Text that is certain now (may be empty), the tokens read so far, why it ended if it did.

    `tokens`: those whose text begins in what is out by now, each of them once; with the finish
    reason come all others, so that they are as many as were counted.
    """

    text: str
    num_tokens: int
    finish_reason: str | None = None  # "stop", "length", "tool_calls"
    tokens: tuple[PlacedToken, ...] = ()
    calls: tuple[Call, ...] = ()


def joined(pieces: Sequence[Piece]) -> Piece:
    """Pieces that follow one another, as one."""
    if len(pieces) == 1:
        return pieces[0]
    text = "".join(piece.text for piece in pieces)
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    last = pieces[-1]  # the only one that may have calls
    return Piece(text, last.num_tokens, last.finish_reason, tokens, last.calls)


async def complete(
    engine: Engine,
    detokenizer: Detokenizer,
    stops: StopStrings,
    prompt: Sequence[int],
    sampling: Sampling,
    echoed: bool = False,
) -> AsyncGenerator[Piece, None]:
    """The pieces of one completion; only the last one has a finish reason. Raises `EngineError`.

    A character that the token budget cut in half is left out. `echoed`: the prompt goes first; the
    engine begins with its first token, and the next ones that come are the prompt's.
    """
    transcript = _Transcript(detokenizer, stops)
    left = 0  # tokens of the prompt that are to come
    if echoed:
        yield transcript.echo(Token(prompt[0]))
        prompt, left = prompt[:1], len(prompt) - 1
    if sampling.max_tokens == 0:
        yield transcript.cut()
        return
    async with aclosing(engine.generate(prompt, sampling)) as tokens:
        async for token in tokens:
            if left:
                left -= 1
                yield transcript.echo(token)
                continue
            ended = token.id in engine.eos_tokens
            piece = transcript.end(token) if ended else transcript.add(token)
            yield piece
            if piece.finish_reason:
                return
    yield transcript.cut()


class _Transcript:
    """The text so far, and the tokens whose text is not out yet."""

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings):
        self._detokenizer, self._stops = detokenizer, stops
        self._num_tokens = self._num_read = self._num_sent = 0  # the latter two in characters
        self._waiting: deque[PlacedToken] = deque()

    def add(self, token: Token) -> Piece:
        self._num_tokens += 1
        text, stopped = self._stops.add(self._read(token))
        return self._stopped(text) if stopped else self._piece(text, None)

    def echo(self, token: Token) -> Piece:
        """A token of the prompt: it counts for nothing, and no stop string is looked for."""
        return self._piece(self._read(token), None)

    def end(self, token: Token) -> Piece:
        """The model ended the text itself, with `token`: what was held back goes out."""
        self._num_tokens += 1
        text, stopped = self._stops.add(self._detokenizer.rest())
        if not stopped:
            text += self._stops.rest()
        self._waiting.append(PlacedToken(token, self._num_sent + len(text)))
        return self._stopped(text)

    def _stopped(self, text: str) -> Piece:
        """The last piece, of `text`; tokens that wait and begin after it are not in it."""
        piece = self._piece(text, "stop")
        end = self._num_sent
        unseen = tuple(PlacedToken(waiting.token, end, unseen=True) for waiting in self._waiting)
        self._waiting.clear()
        return replace(piece, tokens=piece.tokens + unseen)

    def cut(self) -> Piece:
        """The budget ended it."""
        return self._piece(self._stops.rest(), "length", everything=True)

    def _read(self, token: Token) -> str:
        self._waiting.append(PlacedToken(token, self._num_read))
        decoded = self._detokenizer.add(token.id)
        self._num_read += len(decoded)
        return decoded

    def _piece(self, text: str, reason: str | None, *, everything: bool = False) -> Piece:
        self._num_sent += len(text)
        out = []
        while self._waiting and (everything or self._waiting[0].offset < self._num_sent):
            out.append(self._waiting.popleft())
        return Piece(text, self._num_tokens, reason, tuple(out))


Item = TypeVar("Item")
# (place of a stream, item of it), the error that ended one, or None for one that ended well
_Events: TypeAlias = asyncio.Queue[tuple[int, Item] | Exception | None]


async def together(
    streams: Sequence[AsyncGenerator[Item, None]],
) -> AsyncGenerator[dict[int, list[Item]], None]:
    """What the streams gave since the last time, in order, by their places; never nothing.

    A reader that is slow gets more at a time. All streams end with this one, and the first that
    fails ends them all with its error.
    """
    events: _Events[Item] = asyncio.Queue()
    tasks = [asyncio.create_task(_read(i, stream, events)) for i, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            arrived = await _all_that_arrived(events)
            given: dict[int, list[Item]] = {}
            for index, item in (event for event in arrived if isinstance(event, tuple)):
                given.setdefault(index, []).append(item)
            if given:
                yield given
            for event in arrived:
                if isinstance(event, Exception):
                    raise event
            left -= arrived.count(None)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read(index: int, stream: AsyncGenerator[Item, None], events: _Events[Item]) -> None:
    """Put the items of a stream into `events`, and then its end."""
    try:
        async with aclosing(stream):
            async for item in stream:
                events.put_nowait((index, item))
    except Exception as error:
        events.put_nowait(error)
    else:
        events.put_nowait(None)


async def _all_that_arrived(events: _Events[Item]) -> list[tuple[int, Item] | Exception | None]:
    """Wait for one event; with it come those that arrived meanwhile."""
    arrived = [await events.get()]
    while not events.empty():
        arrived.append(events.get_nowait())
    return arrived
