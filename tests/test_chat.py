"""chat on the CPU: what was said goes along, its commands, and what Ctrl-C stops."""

import io
import os
import pty
import select
import signal
import sys
import time

import pytest
from other_processes import SLOW_STEPS

from twellctl.errors import TwellError
from twellctl.generate import Chat, load


@pytest.fixture(scope="module")
def loaded(relu_llama):
    return load(relu_llama)


@pytest.fixture
def say(cli, relu_llama, monkeypatch):
    """`say(*lines)`: (exit code, stdout, stderr) of a chat whose input they are."""

    def run(*lines: str | bytes):
        given = b"".join(x if isinstance(x, bytes) else f"{x}\n".encode() for x in lines)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        return cli("chat", relu_llama, "--max-tokens", "8")

    return run


def answer(loaded, *turns: str) -> str:
    """The model's answer to a user's and its own turns; a first one that is None: no system's."""
    roles = ["system", *("user", "assistant") * len(turns)]
    spoken = [{"role": r, "content": t} for r, t in zip(roles, turns, strict=False) if t]
    return loaded.generate(spoken, max_tokens=8).text()


def test_what_was_said_goes_along(loaded, say):
    one = answer(loaded, "", "Why?")
    two = answer(loaded, "", "Why?", one, "And then?")
    brief = answer(loaded, "Be brief.", "Why?")
    assert len({one, two, brief, answer(loaded, "", "And then?")}) == 4
    code, out, err = say("Why?", "", "And then?", "/new", "Why?", "/system Be brief.", "Why?")
    assert (code, out) == (0, "".join(f"{text}\n" for text in (one, two, one, brief)))
    assert len(err) == 5  # that it is noise, and figures of each answer
    assert say("Why?", "/exit", "Why?")[:2] == (0, f"{one}\n")


def test_an_answer_that_is_stopped_was_said(loaded):
    chat = Chat(loaded, max_tokens=30, temperature=2.0, seed=1)
    whole = [piece for piece in chat.ask("Why?")]
    chat.begin()
    told = iter([False, False, True])
    assert list(chat.ask("Why?", lambda: next(told))) == whole[:2]
    assert chat.messages[-1] == {"role": "assistant", "content": "".join(whole[:2])}
    assert chat.figures.tokens < 30
    before = chat.messages
    assert list(chat.ask("Why?", lambda: True)) == []
    assert chat.messages == before
    assert list(chat.ask("And?"))


def test_a_conversation_that_fills_the_context(loaded, say):
    chat = Chat(loaded, max_tokens=1000)
    list(chat.ask("Why?"))
    with pytest.raises(TwellError, match="there is room for 256 with the answer"):
        list(chat.ask("So " * 300))
    assert len(chat.messages) == 2
    code, _, err = say("So " * 300, "Why?")
    assert (code, "room for 256" in err[-1]) == (1, True)
    assert say(b"\xff\n")[2][-1] == "error: stdin is not UTF-8 (byte 0): convert it"


def test_a_model_without_a_template_is_refused(loaded, monkeypatch):
    monkeypatch.setattr(loaded.tokenizer, "chat_template", None)
    with pytest.raises(TwellError, match="has no chat template: give one with --chat-template"):
        Chat(loaded)


def test_ctrl_c_stops_the_answer_and_not_the_chat(started, relu_llama):
    """On a terminal: in an answer, and where a line is awaited."""
    terminal, theirs = pty.openpty()
    words = "chat", relu_llama, "--temperature=2", "--seed=1", "--max-tokens=200"
    process = started(*words, code=SLOW_STEPS, terminal=os.ttyname(theirs))

    def until(text: str) -> str:
        seen = ""
        while text not in seen:
            assert select.select([terminal], [], [], 60)[0], f"no {text!r} behind {seen!r}"
            seen += os.read(terminal, 4096).decode(errors="replace")
        return seen

    until("> ")
    for _ in range(2):
        time.sleep(0.5)  # a signal between the prompt and the wait behind it waits for a key
        process.send_signal(signal.SIGINT)
        assert "error" not in until("> ")
        os.write(terminal, b"Why?\n")
        until("Why?\r\n")
        os.read(terminal, 1)  # of the answer
    process.send_signal(signal.SIGINT)
    assert "the first after" in until("> ")
    os.write(terminal, b"\x04")
    assert process.wait() == 0
    os.close(terminal)
    os.close(theirs)
