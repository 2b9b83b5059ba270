"""Windows of the text that `--data` names: most to learn from, some held out, of other texts
or pieces of them."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from twellctl.text.blocks import apart, in_turn, token_stream, windows_from_starts
from twellctl.text.reading import read_texts
from twellctl.text.tokens import end_of_text

LONGEST_TEXT = 4  # windows in a row of one text, for others to come in
SPARE = 16  # 1 of so many tokens more is read than is wanted, for windows lose some


def windows_in(
    paths: list[str],
    text_column: str,
    tokenizer: Any,
    vocabulary: int | None,
    seq_len: int,
    tokens: int,
    num_held_out: Callable[[int | None], int],
) -> tuple[np.ndarray, np.ndarray]:
    """(most, held out) int32 `[W, seq_len]` and `[H, seq_len]`, of all `paths` in turn.

    The most are of about so many `tokens`, fewer if the text is short, or none. `num_held_out` says
    how many windows are held out of a text that makes so many; None: it makes as many as wanted.
    """

    def stream(path: str) -> Iterator[np.ndarray]:
        return token_stream(read_texts([path], text_column, tokenizer), tokenizer, vocabulary)

    texts = list[np.ndarray]()
    left = tokens + tokens // SPARE + num_held_out(None) * seq_len
    for text in in_turn((stream(path) for path in paths), LONGEST_TEXT * seq_len):
        texts.append(text)
        if (left := left - len(text)) <= 0:
            break
    size = sum(map(len, texts))
    held = num_held_out(size // seq_len)
    parts = apart(texts, (held + 1) * seq_len / max(1, size))  # one is not filled
    first = end_of_text(tokenizer)
    most, few = (windows_from_starts(part, seq_len, first) for part in parts)
    return _whole(most, max(1, tokens // seq_len), seq_len), _whole(few, held, seq_len)


def _whole(windows: Iterable[np.ndarray], most: int, seq_len: int) -> np.ndarray:
    found = [*islice(windows, most)]
    return np.stack(found) if found else np.zeros((0, seq_len), np.int32)
