"""What OpenAI's endpoints answer, as dicts: whole answers, chunks of a stream. No HTTP."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from twellctl.serving.completion import Call, Piece, PlacedToken
from twellctl.serving.logprobs import (
    TokenSpelling,
    chat_logprobs,
    densities,
    drafters,
    text_logprobs,
)
from twellctl.serving.openai_requests import Options


@dataclass
class Choice:
    """One completion, put together from its pieces."""

    index: int
    text: str = ""
    tokens: list[PlacedToken] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: str | None = None
    calls: tuple[Call, ...] = ()

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.calls = piece.calls
        self.tokens += piece.tokens
        self.num_tokens, self.finish_reason = piece.num_tokens, piece.finish_reason


@dataclass
class Usage:
    """Tokens read and written; every prompt counts once, whatever `n`."""

    prompt_tokens: int
    completion_tokens: int = 0

    def body(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


@dataclass
class Answer:
    """The form of one answer: its id, and how choices and chunks are spelled."""

    options: Options
    spelling: TokenSpelling
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    prefix = ""
    whole_object = ""
    chunk_object = ""
    logprobs = staticmethod(chat_logprobs)

    def whole(self, choices: list[Choice], usage: Usage) -> dict[str, Any]:
        """The answer in one piece."""
        spelled = [
            self._choice(c.index, self._text(c.text, c.calls), c.finish_reason, c.tokens)
            for c in choices
        ]
        return self._body(self.whole_object, spelled) | {"usage": usage.body()}

    def closing(self, usage: Usage) -> list[dict[str, Any]]:
        """The chunks that end a stream: the usage, where the client asked for it."""
        if not self.options.include_usage:
            return []
        return [self._body(self.chunk_object, []) | {"usage": usage.body()}]

    def opening(self, index: int) -> list[dict[str, Any]]:
        """The chunks that begin choice `index`."""
        return []

    def chunks(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """The chunks for a piece of choice `index`."""
        raise NotImplementedError

    def _text(self, text: str, calls: Sequence[Call] = ()) -> dict[str, Any]:
        raise NotImplementedError

    def _chunk(
        self,
        index: int,
        text: dict[str, Any],
        finish_reason: str | None = None,
        tokens: Sequence[PlacedToken] = (),
    ) -> dict[str, Any]:
        choice = self._choice(index, text, finish_reason, tokens or None)
        chunk = self._body(self.chunk_object, [choice])
        if found := self._of_tokens(tokens):
            chunk["twell"] = found
        return chunk

    def _of_tokens(self, tokens: Sequence[PlacedToken]) -> dict[str, list]:
        """What a stream says of its tokens beyond OpenAI's fields; each list has one item a token
        of the text."""
        wanted = {
            "densities": densities if self.options.sampling.densities else None,
            "drafters": drafters if self.options.drafters else None,
        }
        seen = [placed.token for placed in tokens if not placed.unseen]
        return {name: of(seen) for name, of in wanted.items() if of and seen}

    def _choice(
        self,
        index: int,
        text: dict[str, Any],
        finish_reason: str | None,
        tokens: Sequence[PlacedToken] | None,
    ) -> dict[str, Any]:
        logprobs = None
        if self.options.sampling.top_logprobs is not None and tokens is not None:
            logprobs = self.logprobs(tokens, self.spelling)
        return {"index": index, **text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.prefix + self.id,
            "object": kind,
            "created": self.created,
            "model": self.options.model,
            "choices": choices,
        }


class ChatAnswer(Answer):
    """/v1/chat/completions: a message, or deltas of one."""

    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> list[dict[str, Any]]:
        return [self._chunk(index, {"delta": {"role": "assistant", "content": ""}})]

    def chunks(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        made = []
        if piece.text or piece.tokens:
            made.append(self._chunk(index, {"delta": {"content": piece.text}}, None, piece.tokens))
        if piece.calls:
            made.append(self._chunk(index, {"delta": {"tool_calls": _spelled(piece.calls)}}))
        if piece.finish_reason:
            made.append(self._chunk(index, {"delta": {}}, piece.finish_reason))
        return made

    def _text(self, text: str, calls: Sequence[Call] = ()) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message |= {"content": text or None, "tool_calls": _spelled(calls)}
        return {"message": message}


class TextAnswer(Answer):
    """/v1/completions: plain text."""

    prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    logprobs = staticmethod(text_logprobs)

    def chunks(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        if not (piece.text or piece.tokens or piece.finish_reason):
            return []
        return [self._chunk(index, self._text(piece.text), piece.finish_reason, piece.tokens)]

    def _text(self, text: str, calls: Sequence[Call] = ()) -> dict[str, Any]:
        return {"text": text}


def _spelled(calls: Sequence[Call]) -> list[dict[str, Any]]:
    return [
        {
            "index": number,
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for number, call in enumerate(calls)
    ]
