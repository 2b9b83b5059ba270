"""serve-local: which calls of tools are read in an answer, and what of it stays text."""

import asyncio

import pytest

from twellctl.serving.completion import Piece
from twellctl.serving.tools import with_calls
from twellctl.text.thinking import MARKS


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def streamed(text: str) -> list[Piece]:
    """What clients get of it, letter by letter."""

    async def pieces():
        for letter in text:
            yield Piece(letter, 1)
        yield Piece("", 0, finish_reason="stop")

    async def read() -> list[Piece]:
        return [piece async for piece in with_calls(pieces())]

    return asyncio.run(read())


DRAFT = f"<think>{call('rm')}</think>"


@pytest.mark.parametrize(
    ("text", "names", "said"),
    [
        (call("f"), ["f"], ""),
        (f"So.\n{call('f')}\n{call('g')}", ["f", "g"], "So."),
        (f"{call('f')[:-12]}{call('g')}", ["f", "g"], ""),  # the first one is not closed
        (f"<tool_call> is a mark. {call('f')}", ["f"], "<tool_call> is a mark."),
        (call("f", '{"a": "x </tool_call> y"}'), ["f"], ""),
        (call("f", '{"a": "x\n= 1"}'), ["f"], ""),  # a line end in a text
        (f"{DRAFT}{call('f')}", ["f"], DRAFT),
        (f"<think>\n{call('rm')}", [], f"<think>\n{call('rm')}"),  # thinking that was cut
        (f"<tool_call> it is.\n</think>\n{call('f')}", ["f"], "<tool_call> it is.\n</think>"),
        ("<tool_call>[]", [], "<tool_call>[]"),
        ("a <tool", [], "a <tool"),
    ],
)
def test_calls_of_tools_follow_thinking(text, names, said):
    found = streamed(text)
    assert [one.name for one in found[-1].calls] == names
    assert "".join(piece.text for piece in found).rstrip() == said.rstrip()
    assert found[-1].finish_reason == ("tool_calls" if names else "stop")


@pytest.mark.parametrize(("begin", "end"), list(zip(MARKS[::2], MARKS[1::2], strict=True)))
def test_text_after_a_draft_in_thinking_is_not_held_back(begin, end):
    text = f"{begin}{call('rm')}{end} So it is."
    *before, last = streamed(text)
    assert "".join(piece.text for piece in before) == text
    assert (last.text, last.calls) == ("", ())
