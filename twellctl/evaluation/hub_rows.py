"""Lines of task sets as the hub has them, in the form of `questions`. No torch.

HumanEval, HumanEval+ and LeetCode have `test`; MBPP and MBPP+ `code` and `test_list`; GSM8K an
answer that ends in `#### 7`; ARC and MMLU choices and the letter or number of one.
"""

import ast
from contextlib import suppress
from typing import Any

from twellctl.errors import LeftOut
from twellctl.text.rows import row_prompt, system_in

_LETTERS = "ABCDEFGHIJ"
_TESTS = "{}\nYour code should pass these tests:\n\n{}"
_BEFORE = "{}\n\nBefore your code stands:\n\n```python\n{}\n```"
_ASK = "Question: {}\nAnswer:"


def as_task_row(row: dict[str, Any], where: str) -> dict[str, Any]:
    """`row` itself, or what a row of the hub asks, with the keys that `questions` reads."""
    if "choices" in row:
        return _with_gold(_as_choices(row, where))
    lists = row.get("test_list"), row.get("test_imports", [])
    if "tests" not in row and all(isinstance(part, list) for part in lists) and "code" in row:
        return _from_mbpp(row)
    if "tests" not in row and isinstance(row.get("test"), str):
        return _from_human_eval(row)
    if "answer" in row and "match" not in row:
        return _from_gsm8k(row)
    return row


def solution_in(row: dict[str, Any]) -> str | None:
    """The reference solution of a row for tests: a body that continues the prompt, or all code."""
    found = (row.get(key) for key in ("canonical_solution", "code", "solution"))
    return next((code for code in found if isinstance(code, str) and code.strip()), None)


def _from_mbpp(row: dict[str, Any]) -> dict[str, Any]:
    shown = "\n".join(map(str, row["test_list"]))
    imports = [str(row.get("test_setup_code") or ""), *map(str, row.get("test_imports") or [])]
    tests = str(row.get("test") or shown)
    text = row.get("text") or row.get("prompt")
    made = {"tests": "\n".join([*filter(None, imports), tests])}
    if isinstance(text, str):
        made["prompt"] = _TESTS.format(text.strip(), shown)
    if name := _function_called(shown, str(row["code"])):
        made["entry_point"] = row.get("entry_point", name)
    return row | made


def _function_called(tests: str, code: str) -> str | None:
    """The function of `code` that `tests` call first."""
    try:
        defined = {getattr(node, "name", None) for node in ast.parse(code).body}
        nodes = list(ast.walk(ast.parse(tests)))
    except (SyntaxError, ValueError):
        return None
    called = [n.func for n in nodes if isinstance(n, ast.Call)]
    names = [func.id for func in called if isinstance(func, ast.Name) and func.id in defined]
    return names[0] if names else None


def _from_human_eval(row: dict[str, Any]) -> dict[str, Any]:
    """LeetCode's `query` is what is asked, and its `prompt` the imports before the answer."""
    query, given = row.get("query"), row.get("prompt")
    made = row | {"tests": row["test"]}
    if isinstance(query, str) and isinstance(given, str):
        made["prompt"] = _BEFORE.format(query.strip(), given.strip())
        made.setdefault("solution", row.get("completion"))
    return made


def _from_gsm8k(row: dict[str, Any]) -> dict[str, Any]:
    _, hashes, result = str(row["answer"]).rpartition("####")
    found = {"answer": result.strip(), "match": "number"}
    return row | found if hashes and result.strip() else row


def _as_choices(row: dict[str, Any], where: str) -> dict[str, Any]:
    """ARC's choices are two lists, of texts and of their labels; MMLU's answer is a number."""
    made, choices = row | _query(row, where), row["choices"]
    by_name = choices if isinstance(choices, dict) else {}
    texts, labels = by_name.get("text"), by_name.get("label")
    if isinstance(texts, list) and isinstance(labels, list):
        key = row.get("answerKey")
        return made | {"choices": texts} | ({"gold": labels.index(key)} if key in labels else {})
    if "query" not in row and "gold" not in row and "answer" in row:
        made["gold"] = made.pop("answer")
    return made


def _query(row: dict[str, Any], where: str) -> dict[str, str]:
    """What stands before the choices, if it is a text: messages before it, and the question."""
    if isinstance(row.get("query"), str):
        return {"query": "\n\n".join(filter(None, [system_in(row), row["query"]]))}
    with suppress(LeftOut):
        *before, asked = (message["content"] for message in row_prompt(row, where))
        return {"query": "\n\n".join([*before, _ASK.format(asked)])}
    return {}


def _with_gold(row: dict[str, Any]) -> dict[str, Any]:
    """`gold` may be a choice itself, its number as text, or its letter."""
    gold, choices = row.get("gold"), row["choices"]
    if not isinstance(gold, str) or not isinstance(choices, list):
        return row
    if choices.count(gold) == 1:
        return row | {"gold": choices.index(gold)}
    if gold.isascii() and gold.isdecimal():
        return row | {"gold": int(gold)}
    if len(gold) == 1 and gold in _LETTERS:
        return row | {"gold": _LETTERS.index(gold)}
    return row
