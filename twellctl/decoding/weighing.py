"""Logits that change by what was written (penalties against repeating) and by token (biases).

What a row has written is counted on its device: no step waits for the host.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from twellctl.decoding.sampler import Field


@dataclass(frozen=True)
class Told:
    """What the host knows of a row: all its tokens, how many are the prompt's, its biases."""

    tokens: list[int]
    num_prompt: int
    bias: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Weights:
    """Of rows `[B, V]`: how often each token was written, whether the prompt has it, what is added.

    int32, bool and float32, on the rows' device.
    """

    written: Tensor
    prompted: Tensor
    bias: Tensor

    @classmethod
    def of(cls, num_rows: int, vocab_size: int, device: torch.device) -> "Weights":
        """For rows of which nothing is known."""
        kinds = torch.int32, torch.bool, torch.float32
        made = (torch.zeros((num_rows, vocab_size), dtype=kind, device=device) for kind in kinds)
        return cls(*made)

    def first(self, num_rows: int) -> "Weights":
        """The same tensors' first rows."""
        return Weights(*(part[:num_rows] for part in (self.written, self.prompted, self.bias)))

    def load(self, told: Rows[Told | None]) -> None:
        """Set the rows anew; None: a row without penalties and biases."""
        for part in (self.written, self.prompted, self.bias):
            part.zero_()
        written: list[tuple[int, int, float]] = []
        prompted, bias = [], []
        for row, known in enumerate(told):
            if known is not None:
                prompted += [(row, token, 1) for token in known.tokens[: known.num_prompt]]
                written += [(row, token, 1) for token in known.tokens[known.num_prompt :]]
                bias += [(row, *pair) for pair in known.bias]
        _add(self.written, written)
        _add(self.prompted, prompted)
        _add(self.bias, bias)

    def weighed(self, logits: Tensor, fields: Tensor) -> Tensor:
        """float32 logits `[B, V]` under the penalties in `fields`, int32 `[len(Field), B]`."""
        repetition, frequency, presence = (
            fields[field].view(torch.float32)[:, None]
            for field in (Field.REPETITION, Field.FREQUENCY, Field.PRESENCE)
        )
        logits, was_written = logits.float(), self.written > 0
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(self.prompted | was_written, repeated, logits)
        return logits - frequency * self.written - presence * was_written + self.bias

    def count(self, fields: Tensor) -> None:
        """Each row has written the token in `fields`."""
        tokens = fields[Field.TOKEN].long().clamp(min=0)[:, None]  # below 0: NaN, told elsewhere
        self.written.scatter_add_(1, tokens, torch.ones_like(tokens, dtype=torch.int32))


def _add(where: Tensor, entries: list[tuple[int, int, float]]) -> None:
    if entries:
        rows, tokens, values = (torch.tensor(column) for column in zip(*entries, strict=True))
        places = rows.to(where.device), tokens.to(where.device)
        where.index_put_(places, values.to(where), accumulate=where.dtype != torch.bool)
