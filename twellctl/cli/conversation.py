"""What `twellctl chat` does at the terminal: lines in, answers out. No torch."""

import sys
from typing import Any

from twellctl.cli import interrupts
from twellctl.errors import TwellError
from twellctl.screens import ui
from twellctl.screens.use import generated

PROMPT = "> "
COMMANDS = "/new begins again, /system TEXT says how to answer, /exit ends; Ctrl-C stops an answer"


def converse(chat: Any) -> None:
    """Let whoever is at stdin talk with `chat` (a `Chat`), until the input ends.

    On a terminal an error leaves the conversation as it was; elsewhere it is raised.
    """
    if sys.stdin.isatty():
        ui.note(COMMANDS)
    while True:
        try:
            line = ui.read_line(PROMPT)
        except KeyboardInterrupt:
            interrupts.forget()
            sys.stdout.write("\n")
            continue
        command, _, rest = (line or "").strip().partition(" ")
        if line is None or command == "/exit":
            return
        if command in ("/new", "/system"):
            chat.begin(rest if command == "/system" else "")
        elif command:
            _answer(chat, line)


def _answer(chat: Any, text: str) -> None:
    try:
        with interrupts.first_kept() as stopped:
            ui.stream(chat.ask(text, stopped))
    except TwellError as error:
        if not sys.stdin.isatty():
            raise
        ui.note(f"error: {error}")
        return
    generated(chat.figures)
