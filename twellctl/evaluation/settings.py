"""What `profile`, `eval` and `compare` are told: flags, help, defaults, bounds. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from twellctl.settings import setting

Paths = str | Path | Sequence[str | Path]


@dataclass(frozen=True)
class Reading:
    """The text that is read, and how much of it."""

    data: list[str] = setting(
        [],
        "Text: jsonl, txt or parquet files, or folders. Repeatable: each is a kind of text, by the "
        "file's name or NAME; equal names are one kind.",
        metavar="[NAME=]FILE",
    )
    text_column: str = setting("text", "The column that holds the text.")
    windows: int = setting(128, "Windows, at even strides through the text.", at_least=1)
    seq_len: int | None = setting(
        None, "Tokens of a window. [default: 1024, or the context if shorter]"
    )


@dataclass(frozen=True)
class Evaluating(Reading):
    """On what a model is measured, and beside which other one."""

    reference: str | None = setting(
        None, "A model with the same tokenizer, to compare with.", metavar="MODEL"
    )
    tasks: list[str] = setting(
        [],
        'A jsonl file of {"query", "choices", "gold"}, of {"prompt", "answer"} or of {"prompt", '
        '"entry_point", "tests"}, or a folder of them. Repeatable.',
        metavar="FILE",
    )
    prompts: str | None = setting(
        None,
        'A jsonl file of {"prompt"} or {"messages"}, for both models to answer. [default: the '
        "tasks, or what opens the windows of --data]",
        metavar="FILE",
    )
    limit: int | None = setting(
        None,
        "Ask only so many questions of each task, the first ones, and prompts.",
        at_least=1,
    )
    run_code: bool = setting(
        False, "Run the code that the models write for tests, in processes with limits."
    )


@dataclass(frozen=True)
class Comparing:
    """What two models are asked."""

    prompts: str | None = setting(
        None,
        'A jsonl file of {"prompt"} or {"messages"}. [default: eight of our own]',
        metavar="FILE",
    )
    limit: int | None = setting(None, "Prompts to ask, at even strides. [default: 8]", at_least=1)
    max_tokens: int = setting(256, "Tokens of an answer at most.", at_least=1)
