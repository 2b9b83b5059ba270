"""Tasks in local files, a question a row, of three kinds; how models are asked. No torch.

    {"query": "Q: ...\\nA:", "choices": ["yes", "no"], "gold": 0}
    {"prompt": "What is 6 times 7?", "answer": "42", "match": "number"}
    {"prompt": "Write f ...", "entry_point": "f", "tests": "assert f(1) == 2"}

A file (jsonl, a JSON array, parquet or Arrow) is a task of one kind; a folder holds several. What
is asked stands in any column that `--prompts` reads, with the messages before it. `gold` is the
place of the right choice, from 0. `match` says when what a model writes is the `answer`
(`MATCHES`). `tests` are Python that raises if the code that a model writes, the function
`entry_point`, is wrong. Rows of the hub's sets are read as they are (hub_rows.py).
"""

import ast
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeGuard, TypeVar

import regex

from twellctl.errors import LeftOut, TwellError, UsageError, bounded, reason, shown, usable
from twellctl.evaluation import limited, programs
from twellctl.evaluation.hub_rows import as_task_row, solution_in
from twellctl.evaluation.settings import Progress
from twellctl.evaluation.written import answer_number
from twellctl.files.home import from_home
from twellctl.text.files import OF_ROWS, checked, kind_of, read_rows
from twellctl.text.rows import row_prompt
from twellctl.text.thinking import final_answer
from twellctl.text.tokens import Message, Messages

logger = logging.getLogger(__name__)
PATTERN_SECONDS = 1.0  # that a pattern may take on an answer
_REMEDY = "correct or leave out this row"
_EXAMPLES = {
    "choices": '{"query": "2 + 2 =", "choices": ["3", "4"], "gold": 1}',
    "answer": '{"prompt": "What is 2 + 2?", "answer": 4}',
    "tests": '{"prompt": "Write f.", "entry_point": "f", "tests": "assert f(1) == 2"}',
}


@dataclass(frozen=True)
class Question:
    """What is asked, two or more answers to choose from, and which of them is right."""

    query: str
    choices: tuple[str, ...]
    gold: int
    where: str = field(default="", compare=False)  # file and line


@dataclass(frozen=True)
class Asked:
    """What is asked, the answer, and how the two are compared.

    `before`: messages that come before the prompt, such as a system message.
    """

    prompt: str
    answer: str
    match: str
    where: str = field(default="", compare=False)
    before: tuple[Message, ...] = ()


@dataclass(frozen=True)
class Coded:
    """Code that is asked for, and tests of the function `entry_point`.

    `solution` is a reference solution, if the file has one. `before` as in `Asked`.
    """

    prompt: str
    entry_point: str
    tests: str
    solution: str | None = None
    where: str = field(default="", compare=False)
    before: tuple[Message, ...] = ()


InOwnWords: TypeAlias = Asked | Coded
AnyQuestion: TypeAlias = Question | InOwnWords
Q = TypeVar("Q", bound=AnyQuestion, covariant=True)
# an answer is the text, states the number, holds the text, or a regular expression finds it
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

    Rows that are no questions, or of another kind than most of their file, are left out and counted
    in the log, also after the limit. `TwellError` if a file holds nothing else.
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
    found = sorted(p for p in path.iterdir() if p.is_file() and kind_of(p) in OF_ROWS)
    if not found:
        raise TwellError(f"{path} holds no {', '.join(OF_ROWS)} file: give a folder of tasks")
    return found


def _read_task(file: Path, limit: int | None) -> Task[AnyQuestion]:
    def of_most(question: AnyQuestion) -> AnyQuestion:
        if type(question) is not most:
            raise LeftOut(
                f"{question.where} is a question of another kind than most of its file: put each "
                "kind in a file of its own"
            )
        return question

    rows = read_rows(file, None)
    read = list(usable(rows, _question, logger.warning, f"rows of {file}"))
    if not read:
        raise TwellError(f"{file} holds no question: give a file with some, or leave it out")
    ((most, _),) = Counter(map(type, read)).most_common(1)
    questions = list(usable(read, of_most, logger.warning, f"questions of {file}"))
    return Task(file.stem.removesuffix(kind_of(file)), tuple(questions[:limit]))


def _question(found: tuple[str, Any]) -> AnyQuestion:
    where, row = found[0], checked(found[1])
    if isinstance(row, dict):  # each row of a table has all columns
        row = as_task_row({key: value for key, value in row.items() if value is not None}, where)
    if (wrong := _what_is_wrong(row)) is not None:
        raise LeftOut(f"{where}: {wrong}: {_REMEDY}")
    if "choices" in row:
        return Question(row["query"], tuple(row["choices"]), row["gold"], where)
    *before, asked = row_prompt(row, where)
    others = where, tuple(before)
    if "answer" in row:
        return Asked(asked["content"], str(row["answer"]), _match_of(row), *others)
    code = asked["content"], row["entry_point"], row["tests"]
    return Coded(*code, solution_in(row), *others)


def _what_is_wrong(row: Any) -> str | None:
    """Why `row` is no question; None if it is one."""
    if not isinstance(row, dict):
        return f"a question must be a JSON object, got {shown(row)}"
    kinds = [key for key in _KINDS if key in row]
    if len(kinds) > 1:
        return f"it has keys of two kinds, {kinds[0]!r} and {kinds[1]!r}"
    if not kinds:
        return (
            f"it has none of {', '.join(map(repr, _KINDS))}, as in "
            f"{' or '.join(_EXAMPLES.values())}"
        )
    checks = {"choices": _wrong_choices, "answer": _wrong_answer, "tests": _wrong_tests}
    return checks[kinds[0]](row)


def _wrong_choices(row: dict) -> str | None:
    for key in ("query", "gold"):
        if key not in row:
            return f"it has no {shown(key)}, as in {_EXAMPLES['choices']}"
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
    if match == "number" and answer_number(str(answer)) is None:
        return f"answer must hold a number, got {shown(answer)}"
    if match == "regex":
        try:
            regex.compile(str(answer))
        except regex.error as error:
            return f"answer must be a regular expression, got {shown(answer)} ({reason(error)})"
    return _wrong_prompt(row, "answer")


def _wrong_tests(row: dict) -> str | None:
    for key in ("entry_point", "tests"):
        if key not in row:
            return f"it has no {shown(key)}, as in {_EXAMPLES['tests']}"
        if not isinstance(row[key], str) or not row[key].strip():
            return f"{key} must be a text, got {shown(row[key])}"
    if not _is_function(row["entry_point"]):
        return f"entry_point must be the name of a function, got {shown(row['entry_point'])}"
    return _wrong_prompt(row, "tests")


def _is_function(entry_point: str) -> bool:
    """Whether it is the name of a function, or a method as `Class().method`."""
    if entry_point.isidentifier():
        return True
    try:
        node = ast.parse(entry_point, mode="eval").body
    except (SyntaxError, ValueError):
        return False
    owner = node.value if isinstance(node, ast.Attribute) else None
    return isinstance(owner.func if isinstance(owner, ast.Call) else owner, ast.Name)


def _wrong_prompt(row: dict, kind: str) -> str | None:
    """Why `row`, of a `kind`, asks nothing; None if it does."""
    try:
        row_prompt(row, "it")
    except LeftOut as error:
        return f"{error}, as in {_EXAMPLES[kind]}"
    return None


def _match_of(row: dict) -> str:
    """As it says, or by what its answer is: a number, or a text."""
    return row.get("match", "exact" if isinstance(row["answer"], str) else "number")


_WHOLE = (
    "Complete this Python function. Answer with the whole function, its imports included, in one "
    "```python block and nothing else.\n\n```python\n{}\n```"
)
_BLOCK_PLEASE = "{}\n\nAnswer with one ```python block."


def messages_of(question: InOwnWords) -> Messages:
    """What the model is asked."""
    return [*question.before, {"role": "user", "content": _prompt_of(question)}]


def _prompt_of(question: InOwnWords) -> str:
    """A prompt that begins the function wants all of it."""
    if isinstance(question, Asked):
        return question.prompt
    if programs.begins(question.prompt, question.entry_point):
        return _WHOLE.format(question.prompt.rstrip())
    return _BLOCK_PLEASE.format(question.prompt)


def right(
    questions: Sequence[InOwnWords],
    texts: Sequence[str],
    progress: Progress = lambda done, total: None,
) -> tuple[float, ...]:
    """1 for each of `texts` that answers its question, else 0. Code for a `Coded` is run."""
    pairs = list(zip(questions, texts, strict=True))
    sources = [program(asked, text) for asked, text in pairs if isinstance(asked, Coded)]
    if sources:
        return tuple(float(done.passed) for done in limited.run_all(sources, progress))
    return tuple(float(matches(asked, text)) for asked, text in pairs if isinstance(asked, Asked))


def matches(question: Asked, text: str) -> bool:
    """Whether `text`, without any thinking, is the answer; no where a pattern takes too long."""
    wanted, text = question.answer.strip(), final_answer(text).strip()
    if question.match == "number":
        found, number = answer_number(text), answer_number(wanted)
        return found is not None and number is not None and found.equals(number)
    if question.match == "contains":
        return wanted in text
    if question.match == "regex":
        try:
            return regex.search(wanted, text, timeout=PATTERN_SECONDS) is not None
        except TimeoutError:
            return False
    return wanted == text


def program(question: Coded, text: str) -> str:
    """What runs the code in `text` against the tests; it fails if the tests test nothing."""
    if programs.tests_nothing(question.tests, question.entry_point):
        return "raise AssertionError('the tests do not call the function')"
    return programs.program(question.prompt, question.entry_point, question.tests, text)
