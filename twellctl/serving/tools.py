"""Tools that a model may call, and calls in answers, as Qwen, Hermes and many others write them.

<tool_call>
{"name": "weather", "arguments": {"city": "Rome"}}
</tool_call>

No HTTP, no torch.
"""

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from twellctl.serving.completion import Call, Piece
from twellctl.serving.guides import GRAMMAR, Grammar, json_rule, parse_schema
from twellctl.serving.request_fields import check_text, invalid, refuse_keys, unsupported
from twellctl.text.thinking import MARKS, end_of_thinking, final_answer
from twellctl.text.tokens import overlap

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_JSON = json.JSONDecoder(strict=False)  # line ends within texts, as code has them
TOOLS, CHOICE, PARALLEL = "tools", "tool_choice", "parallel_tool_calls"


@dataclass(frozen=True)
class Calling:
    """The functions that the model may call, as the client describes them, and how.

    `named`: only this one may be called. `one`: at most one call.
    """

    tools: tuple[dict[str, Any], ...] = ()
    must: bool = False  # at least one call, and no other text
    named: str | None = None
    one: bool = False

    @property
    def is_guided(self) -> bool:
        """Whether answers must follow a grammar, and not only the model's habits."""
        strict = any(tool["function"].get("strict") for tool in self.tools)
        return bool(self.tools) and (self.must or self.one or strict)


def parse_tools(body: dict[str, Any]) -> Calling:
    """`tools`, `tool_choice` and `parallel_tool_calls` of a request; raises `ApiError`."""
    tools = body.get(TOOLS, [])
    if not isinstance(tools, list):
        raise invalid(TOOLS, "must be a list of functions", tools)
    for number, tool in enumerate(tools):
        _check_tool(f"{TOOLS}[{number}]", tool)
    parallel = body.get(PARALLEL, True)
    if not isinstance(parallel, bool):
        raise invalid(PARALLEL, "must be true or false", parallel)
    choice = body.get(CHOICE, "auto")
    if choice == "none":
        return Calling()
    calling = Calling(tuple(tools), one=not parallel)
    if choice == "auto":
        return calling
    if choice == "required" and tools:
        return replace(calling, must=True)
    return replace(calling, must=True, named=_named(choice, tools))


def _check_tool(where: str, tool: Any) -> None:
    if not isinstance(tool, dict):
        must = 'must be {"type": "function", "function": {"name": ...}}'
        raise invalid(where, must, tool)
    if tool.get("type") != "function":
        raise unsupported(f"{where}.type {json.dumps(tool.get('type'))[:60]}")
    refuse_keys(where, tool, {"type", "function", "cache_control"})
    function, where = tool.get("function"), f"{where}.function"
    if not isinstance(function, dict):
        raise invalid(where, "must be an object with a name", function)
    refuse_keys(where, function, {"name", "description", "parameters", "strict"})
    if not check_text(f"{where}.name", function.get("name")):
        raise invalid(f"{where}.name", "must not be empty", "")
    check_text(f"{where}.description", function.get("description") or "")
    parse_schema(f"{where}.parameters", function.get("parameters"), {})
    if not isinstance(function.get("strict"), bool | None):
        raise invalid(f"{where}.strict", "must be true or false", function["strict"])


def _named(choice: Any, tools: list[dict[str, Any]]) -> str:
    """The function that {"type": "function", "function": {"name": ...}} chooses."""
    names = [tool["function"]["name"] for tool in tools]
    if isinstance(choice, dict) and choice.get("type") == "function":
        refuse_keys(CHOICE, choice, {"type", "function"})
        function = choice.get("function")
        if isinstance(function, dict):
            refuse_keys(f"{CHOICE}.function", function, {"name"})
            if function.get("name") in names:
                return function["name"]
    must = 'must be "none", "auto", "required" or the name of one of tools, and tools be given'
    raise invalid(CHOICE, must, choice)


def call_grammar(calling: Calling, mark: Callable[[str], str]) -> Grammar:
    """The grammar of answers that call functions as `calling` says; `mark` as of `Guides`.

    Arguments follow the functions' parameters, strict or not.
    """
    functions = [tool["function"] for tool in calling.tools]
    if calling.named is not None:
        functions = [function for function in functions if function["name"] == calling.named]
    bodies = []
    for number, function in enumerate(functions):
        begin = f'\n{{"name": {json.dumps(function["name"])}, "arguments": '
        parameters = json_rule({"type": "object"} | (function.get("parameters") or {}))
        body = f'{json.dumps(begin)} {parameters} "}}\\n" {mark(CLOSE)}'
        bodies.append(f"body_{number}: {body}")
    rules = _rules_if_must(calling, mark) if calling.must else _rules_of_text(calling, mark)
    names = " | ".join(f"body_{number}" for number in range(len(bodies)))
    return Grammar("\n".join([GRAMMAR + rules, f"body: {names}", *bodies, ""]), TOOLS)


def _rules_if_must(calling: Calling, mark: Callable[[str], str]) -> str:
    more = "" if calling.one or calling.named else ' ("\\n" call)*'
    return f"start: call{more}\ncall: {mark(OPEN)} body"


def _rules_of_text(calling: Calling, mark: Callable[[str], str]) -> str:
    """Any text that holds no `OPEN` but where a call begins."""
    start = "start: text | call" if calling.one else "start: call* text"
    tokens = [mark(text) for text in MARKS if _is_token(text, mark)]  # which TEXT does not hold
    more = f" (({' | '.join(tokens)}) TEXT?)*" if tokens else ""
    text = f"text: TEXT?{more}\nTEXT: /(.|\\n)+/"
    if _is_token(OPEN, mark):
        return f"{start}\ncall: text {mark(OPEN)} body\n{text}"
    return f"{start}\ncall: head body\nhead[lazy]: /(.|\\n)*/ {mark(OPEN)}\n{text}"


def _is_token(text: str, mark: Callable[[str], str]) -> bool:
    return mark(text) != json.dumps(text)


def knows_tools(tokenizer: Any) -> bool:
    """Whether the chat template for tools tells the model of them, and to call them so."""
    try:
        template = tokenizer.get_chat_template(tools=[{}])
        return "tools" in template and OPEN in template
    except Exception:  # there is none, or several and none for all
        return False


async def with_calls(pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[Piece, None]:
    """The same pieces; from the first call on text is held back, and comes as calls at the end.

    What looks like a call and is none stays text, and so do calls in thinking.
    """
    held = sent = ""
    async with aclosing(pieces):
        async for piece in pieces:
            out, held = _split_at_call(held + piece.text)
            sent += out
            if not piece.finish_reason:
                yield replace(piece, text=out)
                continue
            is_cut = not final_answer(sent + held)  # in the middle of thinking
            calls, rest = ((), held) if is_cut else _calls(held)
            reason = "tool_calls" if calls and piece.finish_reason == "stop" else None
            ended = reason or piece.finish_reason
            yield replace(piece, text=out + rest, finish_reason=ended, calls=calls)


def _split_at_call(text: str) -> tuple[str, str]:
    """(what is before the first call after any thinking, the rest)."""
    at = text.find(OPEN, end_of_thinking(text))
    cut = at if at >= 0 else len(text) - overlap(text, OPEN)
    return text[:cut], text[cut:]


def _calls(text: str) -> tuple[tuple[Call, ...], str]:
    """(the calls in `text` after any thinking, what is none).

    A call is JSON from its mark to the end of the object; a closing mark may follow.
    """
    answer = final_answer(text)
    rest, at = [text[: len(text) - len(answer)]], 0
    calls: list[Call] = []
    while (mark := answer.find(OPEN, at)) >= 0:
        found = _call_at(answer, mark + len(OPEN))
        end = mark + len(OPEN) if found is None else found[1]
        if found is not None:
            calls.append(found[0])
        rest.append(answer[at : end if found is None else mark])
        at = end
    rest.append(answer[at:])
    said = "".join(rest)
    return tuple(calls), said if said.strip() else ""


def _call_at(text: str, start: int) -> tuple[Call, int] | None:
    """(the call whose JSON begins at `start`, the end of it); None if there is none."""
    begin = start + len(text[start:]) - len(text[start:].lstrip())
    try:
        call, end = _JSON.raw_decode(text, begin)
        given = call["arguments"] if "arguments" in call else call.get("parameters", {})
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        made = Call(str(call["name"]), arguments)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    closing = text[end:].lstrip()
    return made, len(text) - len(closing.removeprefix(CLOSE)) if closing.startswith(CLOSE) else end
