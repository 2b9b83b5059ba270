"""Tasks that a model answers in its own words: how it is asked, and when it is right. No torch."""

import math
import re
from collections.abc import Callable, Sequence

from twellctl.evaluation import limited
from twellctl.evaluation.questions import Asked, Coded, last_number

_BLOCK = re.compile(r"```(?:python|py)?\s*\n(.*?)(?:```|\Z)", re.DOTALL)
_WHOLE = (
    "Complete this Python function. Answer with the whole function, its imports included, in one "
    "```python block and nothing else.\n\n```python\n{}\n```"
)
_BLOCK_PLEASE = "{}\n\nAnswer with one ```python block."


def prompt_of(question: Asked | Coded) -> str:
    """What the model is asked. A prompt that begins the function wants all of it."""
    if isinstance(question, Asked):
        return question.prompt
    if _begins(question):
        return _WHOLE.format(question.prompt.rstrip())
    return _BLOCK_PLEASE.format(question.prompt)


def right(
    questions: Sequence[Asked | Coded],
    texts: Sequence[str],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[float, ...]:
    """1 for each of `texts` that answers its question, else 0. It runs the code of `Coded` ones."""
    if isinstance(questions[0], Coded):
        programs = [program(*one) for one in zip(questions, texts, strict=True)]
        return tuple(float(done.passed) for done in limited.run_all(programs, progress))
    return tuple(float(matches(*one)) for one in zip(questions, texts, strict=True))


def matches(question: Asked, text: str) -> bool:
    wanted, text = question.answer.strip(), text.strip()
    if question.match == "number":
        found = last_number(text)
        return found is not None and math.isclose(found, last_number(wanted), rel_tol=1e-6)
    if question.match == "contains":
        return wanted in text
    if question.match == "regex":
        return re.search(wanted, text) is not None
    return wanted == text


def program(question: Coded, text: str) -> str:
    """The code in `text`, what the prompt imports before it, its tests behind it.

    It is the first block that defines the function, else the first one, else all of the text;
    where none defines it, it goes on from the prompt.
    """
    blocks = _BLOCK.findall(text) or [text]
    code = next((block for block in blocks if _define(question) in block), blocks[0])
    if _begins(question) and _define(question) not in code:
        code = question.prompt + code
    lines = question.prompt.splitlines()
    imports = "\n".join(line for line in lines if line.startswith(("import ", "from ")))
    return f"{imports}\n{code}\n\n{question.tests}\n"


def _define(question: Coded) -> str:
    return f"def {question.entry_point}"


def _begins(question: Coded) -> bool:
    return _define(question) in question.prompt
