"""What one row holds, in any of the forms that data sets on the hub have: a text, a chat, or both
sides of a question.

`--data` reads the whole of it (`row_text`), `--prompts` and `--tasks` up to what a user asks
(`row_prompt`). All know the same columns.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Any

from twellctl.errors import LeftOut, TwellError, bounded, shown
from twellctl.text.messages import ROLES, TEXTS, with_object
from twellctl.text.tokens import Message, Messages, chat_text
from twellctl.text.written import is_written, written_text

CHATS = ("messages", "conversations", "conversation")
# the first of these that a row has is the question, and the first of those below its answer
QUESTIONS = ("prompt", "instruction", "question", "query", "problem", "input")
ANSWERS = ("completion", "output", "response", "solution", "chosen", "answer")
DETAILS = ("input", "context")  # follow what is asked; the first one only an instruction
SYSTEM = ("system", "system_prompt")
IDS = ("input_ids", "token_ids", "tokens")
COLUMNS = tuple(dict.fromkeys([*CHATS, *QUESTIONS, *ANSWERS, *DETAILS, *SYSTEM]))
# ShareGPT's names of who speaks
_ROLES = ROLES | {"human": "user", "observation": "tool"}
_ROLES |= dict.fromkeys(("gpt", "chatgpt", "model", "function_call"), "assistant")


def row_text(row: Any, text_column: str, tokenizer: Any, where: str) -> str:
    """The text of `row`; raises `LeftOut` if it holds none, or something that is wrong.

    What `twellctl write` wrote; else that in `text_column`; a chat (`messages` of role and content,
    or ShareGPT's `conversations` of from and value); or a question and its answer, as a chat where
    the tokenizer has a template. A row can also be a text or a list of messages itself.
    """
    if isinstance(row, str) and row:
        return row
    row = _as_object(row, where)
    if (text := written_text(row, tokenizer)) is not None:
        return text
    value = row.get(text_column)
    if isinstance(value, str) and value and not is_written(row):
        return value
    turns = _chat_in(row, (text_column, *CHATS))
    if turns is None and value is not None and not isinstance(value, str | list):
        raise LeftOut(
            f"{where}: {shown(text_column)} must be a text, got {shown(value)}: correct or leave "
            "out this row"
        )
    if turns := turns or _whole_chat(row):
        return _chat(_messages(row, turns, where), tokenizer, where)
    question, answer = _first(row, QUESTIONS), _first(row, ANSWERS)
    if question and answer:
        return _pair(row, question, answer, tokenizer, where)
    wanted = f"no text in {shown(text_column)}, only {some(row)}: see --text-column"
    raise LeftOut(f"{where} {_ids_in(row) or 'has ' + wanted}")


def row_prompt(row: Any, where: str) -> Messages:
    """The messages of `row` up to the last of a user's; raises as `row_text` does.

    A chat, a question, whose answer is not read, or a text. All contents are texts.
    """
    row = _as_object({"prompt": row} if isinstance(row, str) else row, where)
    turns = _chat_in(row, CHATS) or _whole_chat(row)
    if turns is None and (question := _first(row, QUESTIONS)):
        turns = _asked(row, question, where)
    if turns is None:
        wanted = f"prompt, instruction, question or messages, only {some(row) or 'none'}"
        raise LeftOut(f"{where} {_ids_in(row) or 'has nothing in a column such as ' + wanted}")
    messages = _messages(row, turns, where)
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    if not messages or not messages[-1]["content"].strip():
        raise LeftOut(f"{where} has no text of a user's that could be answered")
    return messages


def system_in(row: dict[str, Any]) -> str:
    """The system message that a row has in a column of its own; "" without one."""
    return next((row[name] for name in SYSTEM if isinstance(row.get(name), str)), "")


def some(names: Iterable[str]) -> str:
    """The first of `names`, which others chose."""
    return bounded(", ".join(map(str, islice(names, 20))), 200)


def _as_object(row: Any, where: str) -> dict[str, Any]:
    if isinstance(row, dict):
        return row
    if _is_chat(row):
        return {"messages": row}
    raise LeftOut(f"{where} is {shown(row)}: each row must be an object, or a list of messages")


def _chat_in(row: dict[str, Any], names: Iterable[str]) -> list[Any] | None:
    """The first list in one of the columns `names`, unless they are ids."""
    values = (row.get(name) for name in names if name not in IDS)
    return next((value for value in values if isinstance(value, list) and value), None)


def _whole_chat(row: dict[str, Any]) -> list[Any] | None:
    """The messages of an answer that is a list of them and begins with the question."""
    answer: Any = row.get(_first(row, ANSWERS) or "")
    if not _is_chat(answer):
        return None
    speakers = [_ROLES.get(str(turn.get("role", turn.get("from")))) for turn in answer]
    return answer if speakers[speakers[0] == "system" :][:1] == ["user"] else None


def _first(row: dict[str, Any], names: Iterable[str]) -> str | None:
    """The first of `names` that the row has something in."""
    return next((name for name in names if row.get(name)), None)


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) for m in value)


def _ids_in(row: dict[str, Any]) -> str | None:
    """What is wrong with a row of token ids; None for others."""
    ids = _first(row, IDS)
    return ids and f"holds token ids ({ids}), which are not read: give text"


def _pair(row: dict[str, Any], question: str, answer: str, tokenizer: Any, where: str) -> str:
    """A question and its answer: as a chat, or one after the other where there is no template."""
    asked, said = _asked(row, question, where), row[answer]
    if not _is_chat(said) and not isinstance(said, str):
        raise LeftOut(f"{where}: a question and its answer must be texts: correct this row")
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if not has_template and not _is_chat(row[question]) and isinstance(said, str):
        return ("" if answer == "completion" else "\n\n").join((asked[0]["content"], said))
    end = said if _is_chat(said) else _said("assistant", said)
    return _chat(_messages(row, [*asked, *end], where), tokenizer, where)


def _said(role: str, content: str) -> Messages:
    return [{"role": role, "content": content}]


def _asked(row: dict[str, Any], name: str, where: str) -> list[Any]:
    """The messages of the question in the column `name`, which what it is about follows."""
    if _is_chat(row[name]):
        return row[name]
    details = DETAILS if name == "instruction" else DETAILS[1:]
    parts = [row[name], *(row[detail] for detail in details if row.get(detail))]
    if not all(isinstance(part, str) for part in parts):
        raise LeftOut(f"{where}: a question and its answer must be texts: correct this row")
    return _said("user", "\n\n".join(parts))


def _messages(row: dict[str, Any], turns: list[Any], where: str) -> Messages:
    """`turns` as a chat template takes them, after the row's own system message."""
    messages = [_message(turn, where) for turn in turns]
    system = system_in(row)
    if system and messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    return messages


def _message(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict):
        raise LeftOut(f"{where}: messages must be objects: correct or leave out this row")
    made = {key: value for key, value in turn.items() if value is not None}  # as tables have them
    if "role" not in made and "from" in made:
        made = {"role": made["from"], "content": made.get("value")}
    role, content = made.get("role"), made.get("content")
    made["role"] = _ROLES.get(role, role) if isinstance(role, str) else role
    if content is None and made["role"] == "assistant":
        content = ""  # of one that called tools, for example
    parts = content if isinstance(content, list) else [content]
    made["content"] = "".join(_text_of(part, where) for part in parts)
    if isinstance(calls := made.get("tool_calls"), list):
        made["tool_calls"] = list(map(with_object, calls))
    return made


def _text_of(part: Any, where: str) -> str:
    """The text of a part of a message's content."""
    text = part
    if isinstance(part, dict) and part.get("type") in (None, *TEXTS):
        text = part.get("text")
    if not isinstance(text, str):
        raise LeftOut(f"{where}: a message must hold text, and nothing else: leave out this row")
    return text


def _chat(messages: Messages, tokenizer: Any, where: str) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise TwellError(f"{where} holds messages, but the tokenizer has no chat template")
    try:
        return chat_text(tokenizer, messages, opens_answer=False)
    except ValueError as error:
        raise LeftOut(f"{where}: {error}; correct or leave out this row") from error
