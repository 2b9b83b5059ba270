"""Tasks in local files, a question a row, as JSON, of three kinds; how models are asked. No torch.

    {"query": "Q: ...\\nA:", "choices": ["yes", "no"], "gold": 0}
    {"prompt": "What is 6 times 7?", "answer": "42", "match": "number"}
    {"prompt": "Write f ...", "entry_point": "f", "tests": "assert f(1) == 2"}

A file, of lines or of one array, is a task of one kind, a folder holds several. `gold` is the place
of the right choice, from 0. `match` says when what a model writes is the `answer` (`MATCHES`).
`tests` are Python that raises if the code that a model writes, the function `entry_point`, is
wrong. A line of HumanEval has them as `test`, a function check(candidate).
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeGuard, TypeVar

from twellctl.errors import TwellError, UsageError, bounded, reason, shown
from twellctl.evaluation import limited
from twellctl.evaluation.settings import Progress
from twellctl.files.home import from_home
from twellctl.text.files import kind_of, read_rows

SUFFIXES = (".jsonl", ".json")
_REMEDY = "correct or leave out this line"


@dataclass(frozen=True)
class Question:
    """What is asked, two or more answers to choose from, and which of them is right."""

    query: str
    choices: tuple[str, ...]
    gold: int


@dataclass(frozen=True)
class Asked:
    """What is asked, the answer, and how the two are compared."""

    prompt: str
    answer: str
    match: str


@dataclass(frozen=True)
class Coded:
    """Code that is asked for, and tests of the function `entry_point`."""

    prompt: str
    entry_point: str
    tests: str


InOwnWords: TypeAlias = Asked | Coded
AnyQuestion: TypeAlias = Question | InOwnWords
Q = TypeVar("Q", bound=AnyQuestion, covariant=True)
# an answer is the text, has its last number equal to it, holds it, or a regular expression finds it
MATCHES = ("exact", "number", "contains", "regex")
_KINDS = {
    "choices": Question,
    "answer": Asked,
    "tests": Coded,
}  # by the key that only they have


@dataclass(frozen=True)
class Task(Generic[Q]):
    """Questions of one kind, under the name of their file."""

    name: str
    questions: tuple[Q, ...]

    @property
    def kind(self) -> str:
        """ "choices", "answer" or "tests"."""
        return next(key for key, kind in _KINDS.items() if isinstance(self.questions[0], kind))


def has_choices(task: Task[AnyQuestion]) -> TypeGuard[Task[Question]]:
    """Whether the answers of `task` are chosen."""
    return task.kind == "choices"


def is_in_own_words(task: Task[AnyQuestion]) -> TypeGuard[Task[InOwnWords]]:
    """Whether the answers of `task` are written."""
    return task.kind != "choices"


def read_tasks(paths: Sequence[str], limit: int | None = None) -> tuple[Task[AnyQuestion], ...]:
    """The tasks in files and folders of them, the first `limit` questions of each.

    `TwellError` names file and line of what is wrong, also of questions after the limit.
    """
    if not all(paths):
        raise UsageError("an empty name was given for a task: name a file or folder")
    tasks = [_read_task(file, limit) for path in paths for file in _files(from_home(path))]
    for task in tasks:
        if sum(other.name == task.name for other in tasks) > 1:
            raise TwellError(f"two tasks are called {task.name}: rename one of their files")
    return tuple(tasks)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        if path.name == str(path) and not path.suffix and not path.exists():
            raise UsageError(
                f"no task {shown(path.name)}: give a file of questions, or ask lm-eval itself: "
                f"lm_eval --model hf --model_args pretrained=MODEL --tasks {bounded(path.name, 80)}"
            )
        return [path]
    found = sorted(p for p in path.iterdir() if p.is_file() and kind_of(p) in SUFFIXES)
    if not found:
        raise TwellError(f"{path} holds no {' or '.join(SUFFIXES)} file: give a folder of tasks")
    return found


def _read_task(file: Path, limit: int | None) -> Task[AnyQuestion]:
    questions: list[AnyQuestion] = []
    for where, row in read_rows(file, ""):
        questions.append(_question(row, where))
        if type(questions[-1]) is not type(questions[0]):
            raise TwellError(
                f"{where} is a question of another kind than the first one of its file: put each "
                "kind in a file of its own"
            )
    if not questions:
        raise TwellError(f"{file} holds no question: give a file with some, or leave it out")
    return Task(file.stem.removesuffix(kind_of(file)), tuple(questions[:limit]))


def _question(row: Any, where: str) -> AnyQuestion:
    if isinstance(row, dict) and isinstance(row.get("test"), str) and "tests" not in row:
        row["tests"] = f"{row['test']}\n\ncheck({row.get('entry_point')})"
    if (wrong := _what_is_wrong(row)) is not None:
        raise TwellError(f"{where}: {wrong}: {_REMEDY}")
    if "choices" in row:
        return Question(row["query"], tuple(row["choices"]), row["gold"])
    if "answer" in row:
        return Asked(row["prompt"], str(row["answer"]), _match_of(row))
    return Coded(row["prompt"], row["entry_point"], row["tests"])


def _what_is_wrong(row: Any) -> str | None:
    """Why `row` is no question; None if it is one."""
    if not isinstance(row, dict):
        return f"a question must be a JSON object, got {shown(row)}"
    kinds = [key for key in _KINDS if key in row]
    if len(kinds) > 1:
        return f"it has keys of two kinds, {kinds[0]!r} and {kinds[1]!r}"
    if not kinds:
        return f"it has none of {', '.join(map(repr, _KINDS))}"
    return {"choices": _wrong_choices, "answer": _wrong_answer, "tests": _wrong_tests}[kinds[0]](
        row
    )


def _wrong_choices(row: dict) -> str | None:
    for key in ("query", "gold"):
        if key not in row:
            return f"it has no {shown(key)}"
    query, choices, gold = row["query"], row["choices"], row["gold"]
    if not isinstance(query, str):
        return f"query must be a text, got {shown(query)}"
    if not isinstance(choices, list) or not all(isinstance(c, str) and c for c in choices):
        return f"choices must be a list of texts that are not empty, got {shown(choices)}"
    if len(choices) < 2:
        return f"choices must be two or more, got {len(choices)}"
    if type(gold) is not int or not 0 <= gold < len(choices):
        return f"gold must be 0 to {len(choices) - 1}, got {shown(gold)}"
    return None


def _wrong_answer(row: dict) -> str | None:
    answer, match = row["answer"], _match_of(row)
    if type(answer) not in (str, int, float) or not str(answer).strip():
        return f"answer must be a text or a number, got {shown(answer)}"
    if match not in MATCHES:
        return f"match must be {', '.join(MATCHES[:-1])} or {MATCHES[-1]}, got {shown(match)}"
    if match == "number" and last_number(str(answer)) is None:
        return f"answer must hold a number, got {shown(answer)}"
    if match == "regex":
        try:
            re.compile(str(answer))
        except re.error as error:
            return f"answer must be a regular expression, got {shown(answer)} ({reason(error)})"
    return _no_text(row, "prompt")


def _wrong_tests(row: dict) -> str | None:
    missing = (_no_text(row, key) for key in ("prompt", "entry_point", "tests"))
    if (wrong := next(filter(None, missing), None)) is not None:
        return wrong
    if not row["entry_point"].isidentifier():
        return f"entry_point must be the name of a function, got {shown(row['entry_point'])}"
    return None


def _no_text(row: dict, key: str) -> str | None:
    if key not in row:
        return f"it has no {shown(key)}"
    if not isinstance(row[key], str) or not row[key].strip():
        return f"{key} must be a text, got {shown(row[key])}"
    return None


def _match_of(row: dict) -> str:
    """As it says, or by what its answer is: a number, or a text."""
    return row.get("match", "exact" if isinstance(row["answer"], str) else "number")


def last_number(text: str) -> float | None:
    """The last number in a text, as people write it: -1,234.5."""
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return float(found[-1].replace(",", "")) if found else None


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
    questions: Sequence[InOwnWords],
    texts: Sequence[str],
    progress: Progress = lambda done, total: None,
) -> tuple[float, ...]:
    """1 for each of `texts` that answers its question, else 0. Code for a `Coded` is run."""
    pairs = list(zip(questions, texts, strict=True))
    programs = [program(asked, text) for asked, text in pairs if isinstance(asked, Coded)]
    if programs:
        return tuple(float(done.passed) for done in limited.run_all(programs, progress))
    return tuple(float(matches(asked, text)) for asked, text in pairs if isinstance(asked, Asked))


def matches(question: Asked, text: str) -> bool:
    wanted, text = question.answer.strip(), text.strip()
    if question.match == "number":
        found, number = last_number(text), last_number(wanted)
        return (
            found is not None and number is not None and math.isclose(found, number, rel_tol=1e-6)
        )
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
