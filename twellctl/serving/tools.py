"""Calls of tools in answers, as Qwen, Hermes and many others write them. No HTTP, no torch.

<tool_call>
{"name": "weather", "arguments": {"city": "Rome"}}
</tool_call>
"""

import json
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from twellctl.serving.completion import Call, Piece
from twellctl.text.tokens import overlap

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(rf"{OPEN}(.*?)(?:{CLOSE}|\Z)", re.DOTALL)


def knows_tools(tokenizer: Any) -> bool:
    """Whether the chat template for tools tells the model of them, and to call them so."""
    try:
        template = tokenizer.get_chat_template(tools=[{}])
        return "tools" in template and OPEN in template
    except Exception:  # there is none, or several and none for all
        return False


async def with_calls(pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[Piece, None]:
    """The same pieces; from the first call on text is held back, and comes as calls at the end.

    What looks like a call and is none stays text.
    """
    held, inside = "", False
    async with aclosing(pieces):
        async for piece in pieces:
            held, out = held + piece.text, ""
            if not inside:
                at = held.find(OPEN)
                inside = at >= 0
                cut = at if inside else len(held) - overlap(held, OPEN)
                out, held = held[:cut], held[cut:]
            if not piece.finish_reason:
                yield replace(piece, text=out)
                continue
            calls, rest = _calls(held)
            reason = "tool_calls" if calls and piece.finish_reason == "stop" else None
            ended = reason or piece.finish_reason
            yield replace(piece, text=out + rest, finish_reason=ended, calls=calls)


def _calls(text: str) -> tuple[tuple[Call, ...], str]:
    """(the calls in `text`, what is none)."""
    calls = []

    def taken(match: re.Match[str]) -> str:
        try:
            call = json.loads(match[1])
            given = call["arguments"] if "arguments" in call else call.get("parameters", {})
            arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            calls.append(Call(str(call["name"]), arguments))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return match[0]
        return ""

    rest = _CALL.sub(taken, text)
    return tuple(calls), rest if rest.strip() else ""
