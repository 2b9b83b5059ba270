"""The text of one row, in whichever of the forms it is that data sets on the hub have."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

from twellctl.errors import TwellError, bounded, shown
from twellctl.text.tokens import chat_text
from twellctl.text.written import is_written

CHATS = ("messages", "conversations", "conversation")
# (question, what stands beside it, answer): the first whose question and answer are there
PAIRS = (
    ("prompt", None, "completion"),
    ("instruction", "input", "output"),
    ("instruction", "context", "response"),
    ("prompt", None, "response"),
    ("question", None, "answer"),
    ("query", None, "response"),
)
SYSTEM = ("system", "system_prompt")
COLUMNS = tuple(dict.fromkeys([*CHATS, *(n for pair in PAIRS for n in pair if n), *SYSTEM]))
# ShareGPT's names of who speaks
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"}
_ROLES |= {"function": "tool", "observation": "tool", "function_call": "assistant"}


class NoText(Exception):
    """A row that holds no text; the message is for the case that no other one does."""


def row_text(row: Any, text_column: str, tokenizer: Any, where: str) -> str:
    """The text of `row`; raises `NoText`, and `TwellError` for what is wrong in it.

    That in `text_column`; else a chat (`messages` of role and content, or ShareGPT's
    `conversations` of from and value), a question and its answer, as a chat where the tokenizer has
    a template; or what `twellctl write` wrote.
    """
    if not isinstance(row, dict):
        raise TwellError(f"{where} is {shown(row)}: each line must hold one object")
    value = row.get(text_column)
    if isinstance(value, str) and value:
        return value
    if is_written(row) and isinstance(row.get("text"), str):
        return row["text"]
    for name in (text_column, *CHATS):
        if isinstance(row.get(name), list) and row[name]:
            return _chat(_messages(row, row[name], where), tokenizer, where)
    if value is not None and not isinstance(value, str | list):
        raise TwellError(
            f"{where}: {shown(text_column)} must be a text, got {shown(value)}: correct or leave "
            "out this row"
        )
    for question, beside, answer in PAIRS:
        if row.get(question) and row.get(answer):
            return _pair([row[question], row.get(beside)], row[answer], row, tokenizer, where)
    raise NoText(
        f"{where} has no text in {shown(text_column)}, only {some(row)}: see --text-column"
    )


def some(names: Iterable[str]) -> str:
    """The first of `names`, which others chose."""
    return bounded(", ".join(map(str, islice(names, 20))), 200)


def _pair(asked: list[Any], answer: Any, row: dict, tokenizer: Any, where: str) -> str:
    if isinstance(asked[0], list) and isinstance(answer, list):  # each is a part of a chat
        return _chat(_messages(row, [*asked[0], *answer], where), tokenizer, where)
    parts = [part for part in (*asked, answer) if part]
    if not all(isinstance(part, str) for part in parts):
        raise TwellError(f"{where}: a question and its answer must be texts: correct this row")
    if not getattr(tokenizer, "chat_template", None):
        return ("" if "completion" in row else "\n\n").join(parts)
    turns = ("\n\n".join(parts[:-1]), answer)
    said = zip(("user", "assistant"), turns, strict=True)
    messages = [{"role": role, "content": text} for role, text in said]
    return _chat(_messages(row, messages, where), tokenizer, where)


def _messages(row: dict, turns: list[Any], where: str) -> list[dict[str, Any]]:
    """`turns` as a chat template takes them, behind the row's own system message."""
    messages = [_message(turn, where) for turn in turns]
    system = next((row[name] for name in SYSTEM if isinstance(row.get(name), str)), "")
    if system and messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    return messages


def _message(turn: Any, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise TwellError(f"{where}: messages must be objects: correct or leave out this row")
    made = dict(turn)
    if "role" not in made and "from" in made:
        made = {"role": made["from"], "content": made.get("value")}
    role = made.get("role")
    made["role"] = _ROLES.get(role, role) if isinstance(role, str) else role
    if isinstance(content := made.get("content"), list):
        texts = [part.get("text") if isinstance(part, dict) else part for part in content]
        plain = [text for text in texts if isinstance(text, str)]
        if len(plain) < len(texts):
            raise TwellError(f"{where}: a message holds more than text: leave out this row")
        made["content"] = "".join(plain)
    return made


def _chat(messages: list[dict[str, Any]], tokenizer: Any, where: str) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise TwellError(f"{where} holds messages, but the tokenizer has no chat template")
    try:
        return chat_text(tokenizer, messages, opens_answer=False)
    except ValueError as error:
        raise TwellError(f"{where}: {error}; correct or leave out this row") from error
