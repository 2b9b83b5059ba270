"""Windows of text, and of which kind each token is: what fires is counted by kind."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twellctl.firing.counts import LayerCount
from twellctl.firing.profiled import KindDensity
from twellctl.text.blocks import spread_windows, token_stream
from twellctl.text.reading import read_texts, text_files
from twellctl.text.tokens import opening_of

_MOST_READ = 1000


@dataclass(frozen=True)
class TextWindows:
    """Token ids and the number of the kind of each, both int64 `[windows, seq_len]`.

    `text_tokens` are those of the whole text; of fewer than the windows hold, windows overlap.
    """

    ids: Tensor
    numbers: Tensor
    kinds: tuple[str, ...]
    text_tokens: int

    def by_kind(self, counts: Sequence[LayerCount]) -> tuple[KindDensity, ...]:
        """The density of each kind of text; `counts` have added all windows."""
        fired = torch.stack([count.by_kind for count in counts]).cpu()
        tokens = self.numbers.flatten().bincount(minlength=len(self.kinds))
        size = counts[0].intermediate_size
        return tuple(
            KindDensity.of(fired[:, number].tolist(), int(tokens[number]), size, kind)
            for number, kind in enumerate(self.kinds)
        )


def text_windows(
    data: Sequence[str],
    text_column: str,
    tokenizer: Any,
    windows: int,
    seq_len: int,
    vocabulary: int | None = None,
) -> TextWindows:
    """The windows of `spread_windows` over all of `data`, in the order given.

    Each of `data` is a file or folder, or NAME=FILE; those of equal names are one kind. Of each
    `_MOST_READ` times as many tokens are read as all windows hold, at most. A window that spans two
    kinds has tokens of both. Raises `TwellError` for text that cannot be read, and
    for ids that a model of `vocabulary` tokens does not have.
    """
    named = [kind_and_path(entry) for entry in data]
    text_files([path for _, path in named])  # all are there, before the first is read
    kinds = list(dict.fromkeys(kind for kind, _ in named))
    ids, numbers = [], []
    for kind, path in named:
        texts, left = read_texts([path], text_column, tokenizer), _MOST_READ * windows * seq_len
        for tokens in token_stream(texts, tokenizer, vocabulary):
            ids.append(tokens)
            numbers.append(np.full_like(tokens, kinds.index(kind)))
            if (left := left - len(tokens)) <= 0:
                break
    spread = spread_windows(ids, windows, seq_len)
    if opening := opening_of(tokenizer):  # no text without it is ever served
        spread[:, 0] = opening[0]
    return TextWindows(
        spread,
        spread_windows(numbers, windows, seq_len),
        tuple(kinds),
        sum(map(len, ids)),
    )


def kind_and_path(entry: str) -> tuple[str, str]:
    """NAME and FILE of NAME=FILE; a path alone is named by its stem, a folder by its name."""
    named = re.fullmatch(r"([^/=]+)=(.+)", entry)
    if named and not Path(entry).exists():
        return named[1], named[2]
    whole = Path(os.path.abspath(entry))
    return (whole.name if whole.is_dir() else whole.stem), entry
