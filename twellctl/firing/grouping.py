"""Where in the text neurons fire: by kind of text and by position in the window.

The group of a token is its kind and the bucket of its position: 0, 1, 2-3, 4-7 and on by powers of
two. While the model runs, only one sum a group and layer is kept (`LayerCount.by_group`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twellctl.firing.counts import LayerCount
from twellctl.firing.profiled import KindDensity, PositionDensity
from twellctl.text.blocks import spread_windows, token_stream
from twellctl.text.files import kind_and_path
from twellctl.text.reading import read_texts, text_files
from twellctl.text.tokens import opening_of

_MOST_READ = 1000


@dataclass(frozen=True)
class GroupedWindows:
    """Token ids and the group of each, both int64 `[windows, seq_len]`, of these `kinds`.

    `text_tokens` are those of the whole text; of fewer than the windows hold, windows overlap.
    """

    ids: Tensor
    groups: Tensor
    kinds: tuple[str, ...]
    text_tokens: int

    @property
    def num_groups(self) -> int:
        return len(self.kinds) * self._num_buckets

    @property
    def _num_buckets(self) -> int:
        return _bucket(self.ids.shape[1] - 1) + 1

    def by_position(self, counts: Sequence[LayerCount]) -> tuple[PositionDensity, ...]:
        """The density of each bucket of positions; `counts` have added all windows."""
        fired, tokens = (sums.sum(-2) for sums in self._sums(counts))
        size, last = counts[0].intermediate_size, self.ids.shape[1] - 1
        return tuple(
            PositionDensity.of(
                fired[:, bucket].tolist(),
                int(tokens[bucket]),
                size,
                first=1 << bucket >> 1,
                last=min((1 << bucket) - 1, last),
            )
            for bucket in range(self._num_buckets)
        )

    def by_kind(self, counts: Sequence[LayerCount]) -> tuple[KindDensity, ...]:
        """The density of each kind of text; `counts` have added all windows."""
        fired, tokens = (sums.sum(-1) for sums in self._sums(counts))
        size = counts[0].intermediate_size
        return tuple(
            KindDensity.of(fired[:, number].tolist(), int(tokens[number]), size, kind=kind)
            for number, kind in enumerate(self.kinds)
        )

    def _sums(self, counts: Sequence[LayerCount]) -> tuple[Tensor, Tensor]:
        """What fired `[layers, kinds, buckets]`, and tokens `[kinds, buckets]`."""
        fired = torch.stack([count.by_group for count in counts]).cpu()
        tokens = self.groups.flatten().bincount(minlength=self.num_groups)
        shape = len(self.kinds), self._num_buckets
        return fired.unflatten(-1, shape), tokens.unflatten(-1, shape)


def grouped_windows(
    data: Sequence[str],
    text_column: str,
    tokenizer: Any,
    windows: int,
    seq_len: int,
    vocabulary: int | None = None,
) -> GroupedWindows:
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
    buckets = torch.tensor([_bucket(position) for position in range(seq_len)])
    first_groups = spread_windows(numbers, windows, seq_len) * (_bucket(seq_len - 1) + 1)
    spread = spread_windows(ids, windows, seq_len)
    if opening := opening_of(tokenizer):  # no text without it is ever served
        spread[:, 0] = opening[0]
    return GroupedWindows(spread, first_groups + buckets, tuple(kinds), sum(map(len, ids)))


def _bucket(position: int) -> int:
    return position.bit_length()
