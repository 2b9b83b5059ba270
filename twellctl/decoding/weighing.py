"""Logits that change by what was written (penalties against repeating) and by token (biases).

What a row has written is counted on its device: no round waits for the host. Which tokens a guide
allows only the host knows, from token to token.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from twellctl.decoding.rounds import NOT_KEPT
from twellctl.decoding.sampler import Field


@dataclass(frozen=True)
class Penalised:
    """What a row's logits depend on: all its tokens, how many are the prompt's, its biases.

    `allowed`: as of `Guide.compute_bitmask`, None without a guide.
    """

    tokens: list[int]
    num_prompt: int
    bias: tuple[tuple[int, float], ...]
    allowed: bytes | None = None


@dataclass(frozen=True)
class Weights:
    """Of rows `[B, V]`: how often each token was written, whether the prompt has it, what is added,
    whether it may not come.

    int32, bool, float32 and bool, on the rows' device.
    """

    written: Tensor
    prompted: Tensor
    bias: Tensor
    barred: Tensor

    @classmethod
    def of(cls, num_rows: int, vocab_size: int, device: torch.device) -> "Weights":
        """For rows that have written nothing."""
        kinds = torch.int32, torch.bool, torch.float32, torch.bool
        made = (torch.zeros((num_rows, vocab_size), dtype=kind, device=device) for kind in kinds)
        return cls(*made)

    def first(self, num_rows: int) -> "Weights":
        """The same tensors' first rows."""
        return Weights(*(part[:num_rows] for part in vars(self).values()))

    def load(self, rows: Rows[Penalised | None]) -> None:
        """Set the rows anew; None: a row without penalties and biases."""
        for part in vars(self).values():
            part.zero_()
        written: list[tuple[int, int, float]] = []
        prompted, bias = [], []
        for row, known in enumerate(rows):
            if known is not None:
                prompted += [(row, token, 1) for token in known.tokens[: known.num_prompt]]
                written += [(row, token, 1) for token in known.tokens[known.num_prompt :]]
                bias += [(row, *pair) for pair in known.bias]
        _add(self.written, written)
        _add(self.prompted, prompted)
        _add(self.bias, bias)
        guided = [(row, of) for row, of in enumerate(rows) if of is not None]
        self.allow({row: of.allowed for row, of in guided if of.allowed})

    def allow(self, allowed: Mapping[int, bytes]) -> None:
        """Of some rows: which tokens may be next, as `Guide.compute_bitmask` says it."""
        size = self.barred.shape[1]
        for row, bits in allowed.items():
            may = np.unpackbits(np.frombuffer(bits, np.uint8), count=size, bitorder="little")
            self.barred[row] = torch.from_numpy(may == 0).to(self.barred.device)

    def weighed(self, logits: Tensor, fields: Tensor) -> Tensor:
        """float32 logits `[B, V]` under the penalties in `fields`, int32 `[len(Field), B]`."""
        repetition, frequency, presence = (
            fields[field].view(torch.float32)[:, None]
            for field in (Field.REPETITION, Field.FREQUENCY, Field.PRESENCE)
        )
        logits, was_written = logits.float(), self.written > 0
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(self.prompted | was_written, repeated, logits)
        logits = logits - frequency * self.written - presence * was_written + self.bias
        return logits.masked_fill(self.barred, -torch.inf)

    def weighed_all(
        self, logits: Tensor, tokens: Tensor, positions: Tensor, fields: Tensor
    ) -> Tensor:
        """float32 logits `[B, Q, V]` after each of the tokens `[B, Q]` that a round has read.

        Drafts are counted as if they were written, until `count_kept`.
        """
        found = []
        for j in range(tokens.shape[1]):
            if j > 0:
                self._count(tokens[:, j], positions[:, j - 1] >= 0)
            found.append(self.weighed(logits[:, j], fields))
        return torch.stack(found, 1)

    def count_kept(self, tokens: Tensor, positions: Tensor, chosen: Tensor) -> None:
        """Each row has written its `chosen` tokens int32 `[B, Q]`, but `NOT_KEPT`; the drafts among
        the `tokens` it read are not counted any more."""
        for j in range(tokens.shape[1]):
            if j > 0:
                self._count(tokens[:, j], positions[:, j - 1] >= 0, -1)
            self._count(chosen[:, j], chosen[:, j] != NOT_KEPT)

    def _count(self, tokens: Tensor, which: Tensor, times: int = 1) -> None:
        """Of `which` rows the token `[B]`; what is below 0 is none."""
        tokens = tokens.long().clamp(min=0)[:, None]
        self.written.scatter_add_(1, tokens, times * which.int()[:, None])


def _add(where: Tensor, entries: Rows[tuple[int, int, float]]) -> None:
    if entries:
        rows, tokens, values = (torch.tensor(column) for column in zip(*entries, strict=True))
        places = rows.to(where.device), tokens.to(where.device)
        where.index_put_(places, values.to(where), accumulate=where.dtype != torch.bool)
