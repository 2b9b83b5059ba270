"""The settings of `twellctl draft`: flags with help, defaults and checks in one table. No torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from twellctl.decoding.drafted import MOST_DRAFTS
from twellctl.settings import setting

# called with (steps done, of how many, the loss, seconds left; None: not known yet)
Progress: TypeAlias = Callable[[int, int, float, float | None], None]
HELD_OUT = 20  # 1 of so many windows is held out


@dataclass(frozen=True)
class HeadTraining:
    """How a draft head is trained."""

    data: list[str] = setting(
        [],
        "Text to train on: a jsonl, JSON, txt, parquet or Arrow file, compressed or not, or a "
        "folder of them. Repeatable. The model's own answers work best (twellctl write).",
        group="Training",
    )
    text_column: str = setting("text", "The column that holds the text.")
    tokens: int = setting(2_000_000, "Tokens of text to train on.", at_least=1024)
    seq_len: int = setting(512, "Tokens per window of text.", at_least=16)
    epochs: int = setting(2, "Passes over the text.", at_least=1)
    ahead: int = setting(
        4,
        "Steps that the head takes from each token, each from its own state of the step before.",
        at_least=1,
        at_most=MOST_DRAFTS,
    )
    vocabulary: int = setting(
        32_768,
        "Tokens that the head can guess: the most frequent of the text.",
        at_least=1,
    )
    step_tokens: int = setting(10_000, "Tokens per AdamW step; fewer take less memory.", at_least=1)
    learning_rate: float = setting(
        4e-4, "Peak learning rate, after 50 steps; it falls to 0.", above=0
    )
    seed: int = setting(0, "Random seed.", at_least=0, at_most=2**31 - 1)


def windows_held_out(training: HeadTraining, count: int | None = None) -> int:
    """So many of a text that makes `count` windows; None: it makes as many as are wanted."""
    wanted = training.tokens // training.seq_len
    return max(1, (wanted if count is None else min(wanted, count)) // HELD_OUT)
