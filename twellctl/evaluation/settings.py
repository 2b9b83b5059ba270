"""The settings of `profile`, `eval` and `compare`: flags, help, defaults, bounds. No torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from twellctl.settings import setting

Paths: TypeAlias = str | Path | Sequence[str | Path]
Doing: TypeAlias = Callable[[str], None]  # receives what comes next
Progress: TypeAlias = Callable[[int, int], None]  # receives (done, total)


@dataclass(frozen=True)
class Reading:
    """The text that is read, and how much of it."""

    data: list[str] = setting(
        [],
        "Text: a jsonl, JSON, txt, parquet or Arrow file, compressed or not, or a folder of them. "
        "Repeatable: each is one kind of text, called NAME or like the file; equal names are one "
        "kind.",
        metavar="[NAME=]FILE",
    )
    text_column: str = setting("text", "The column that holds the text.")
    windows: int = setting(128, "Evenly spaced windows of text to read.", at_least=1)
    seq_len: int | None = setting(
        None, "Tokens per window. [default: 1024, or the context if shorter]"
    )


@dataclass(frozen=True)
class Evaluating(Reading):
    """What a model is measured on, and which model it is compared with."""

    reference: str | None = setting(
        None, "A model with the same tokenizer to compare with.", metavar="MODEL"
    )
    tasks: list[str] = setting(
        [],
        'A jsonl, JSON, parquet or Arrow file of {"query", "choices", "gold"}, {"prompt", '
        '"answer"} or {"prompt", "entry_point", "tests"}, or a folder of such files. "match" says '
        "when an answer is right: exact (for texts), number (for numbers), contains or regex. "
        "Repeatable.",
        metavar="FILE",
    )
    prompts: str | None = setting(
        None,
        "Prompts for both models to answer, as for 'write --prompts'. [default: the tasks, or the "
        "beginnings of the windows of --data]",
        metavar="FILE",
    )
    limit: int | None = setting(
        None,
        "Ask only this many prompts, and questions of each task (the first ones).",
        at_least=1,
    )
    max_tokens: int = setting(
        512, "Most tokens per answer to a task; thinking needs more.", at_least=1
    )
    run_code: bool = setting(
        False, "Run the code that the models write against its tests, in limited processes."
    )


@dataclass(frozen=True)
class Comparing:
    """What the two models are asked."""

    prompts: str | None = setting(
        None,
        "Prompts to answer, as for 'write --prompts'. [default: eight built-in ones]",
        metavar="FILE",
    )
    limit: int | None = setting(None, "Evenly spaced prompts to ask. [default: 8]", at_least=1)
    max_tokens: int = setting(256, "Most tokens per answer.", at_least=1)
