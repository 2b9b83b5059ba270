"""Multiple-choice tasks in local files: one question a line, as JSON. No torch.

    {"query": "Q: ...\\nA:", "choices": ["yes", "no"], "gold": 0}

A file is a task, a folder holds several. `gold` is the place of the right choice, from 0.
"""

from codecs import BOM_UTF8
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twellctl.errors import TwellError, UsageError, reason, shown
from twellctl.files.strict_json import parse_json, read_file

SUFFIXES = (".jsonl", ".json")
HARNESS_SUFFIXES = (".yaml", ".yml")  # of task files in the form of lm-eval
_REMEDY = "correct or leave out this line"


@dataclass(frozen=True)
class Question:
    """What is asked, two or more answers to choose from, and which of them is right."""

    query: str
    choices: tuple[str, ...]
    gold: int


@dataclass(frozen=True)
class Task:
    """Questions under the name of their file."""

    name: str
    questions: tuple[Question, ...]


def is_local(task: str) -> bool:
    """Whether `task` names a file or folder of questions, there or not, and no task of lm-eval."""
    if not task:
        raise UsageError("an empty name was given for a task: name a file or folder")
    path = Path(task)
    is_path = path.name != task and path.suffix not in HARNESS_SUFFIXES
    return path.is_dir() or path.suffix in SUFFIXES or is_path


def read_tasks(paths: Sequence[str], limit: int | None = None) -> tuple[Task, ...]:
    """The tasks in files and folders of them, the first `limit` questions of each.

    `TwellError` names file and line of what is wrong, also of questions behind the limit.
    """
    tasks = [_read_task(file, limit) for path in paths for file in _files(Path(path))]
    for task in tasks:
        if sum(other.name == task.name for other in tasks) > 1:
            raise TwellError(f"two tasks are called {task.name}: rename one of their files")
    return tuple(tasks)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(p for p in path.iterdir() if p.is_file() and p.suffix in SUFFIXES)
    if not found:
        raise TwellError(f"{path} holds no {' or '.join(SUFFIXES)} file: give a folder of tasks")
    return found


def _read_task(file: Path, limit: int | None) -> Task:
    lines = enumerate(read_file(file).removeprefix(BOM_UTF8).split(b"\n"), 1)
    questions = [_question(line, f"{file}:{number}") for number, line in lines if line.strip()]
    if not questions:
        raise TwellError(f"{file} holds no question: give a file with some, or leave it out")
    return Task(file.stem, tuple(questions[:limit]))


def _question(line: bytes, where: str) -> Question:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise TwellError(f"{where} is not valid JSON ({reason(error)}): {_REMEDY}") from error
    if (wrong := _what_is_wrong(row)) is not None:
        raise TwellError(f"{where}: {wrong}: {_REMEDY}")
    return Question(row["query"], tuple(row["choices"]), row["gold"])


def _what_is_wrong(row: Any) -> str | None:
    """Why `row` is no question; None if it is one."""
    if not isinstance(row, dict):
        return f"a question must be a JSON object, got {shown(row)}"
    for key in ("query", "choices", "gold"):
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
