"""A decoder without a model: the next token is a checksum of all tokens and their places.

It keeps the tokens themselves in pages, so that a page lost, shared or mixed up, a token repeated
or left out gives other tokens than `expected`.
"""

import torch
from torch import Tensor

from twellctl.decoding.pages import PAGE

VOCAB = 211
FIRED = torch.tensor([[1], [4]], dtype=torch.int32)


def following(tokens: list[int]) -> int:
    """The token after `tokens`."""
    total = sum((token + 1) * (7 * i + 3) for i, token in enumerate(tokens))
    return (total * 31 + len(tokens)) % VOCAB


def expected(prompt: list[int], count: int) -> list[int]:
    """`count` tokens after `prompt`."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(following(tokens))
    return tokens[len(prompt) :]


class HistoryDecoder:
    """A `Decoder` on the CPU; `calls` tells its prefills (start, end of each) and steps (rows)."""

    device = torch.device("cpu")
    vocab_size = VOCAB
    context = 1024
    neurons, mapped = (4, 8), 0
    kernels = None
    page_bytes = 4 * PAGE
    max_rows = None
    prefill_chunk = 100
    capturable = False

    def __init__(self):
        self.calls: list[tuple] = []

    def open_cache(self, num_pages: int) -> None:
        self.cache = torch.full((num_pages, PAGE), -1)

    def widths(self, max_pages: int) -> list[int]:
        return sorted({1, max_pages})

    def prefill(self, tokens: Tensor, positions: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        assert tokens.numel() <= self.prefill_chunk
        starts = positions.masked_fill(positions < 0, self.context).amin(1).tolist()
        ends = (positions[:, -1] + 1).tolist()
        self.calls.append(
            ("prefill", *(at for span in zip(starts, ends, strict=True) for at in span))
        )
        for row, position in (positions >= 0).nonzero().tolist():
            self._write(tables[row], int(positions[row, position]), int(tokens[row, position]))
        logits = [self._logits(table, end) for table, end in zip(tables, ends, strict=True)]
        return torch.stack(logits), FIRED.expand(2, len(tokens))

    def step(self, tokens: Tensor, positions: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        self.calls.append(("step", len(tokens)))
        for table, position, token in zip(tables, positions.tolist(), tokens, strict=True):
            self._write(table, position, int(token))
        lengths = (positions + 1).tolist()
        logits = [self._logits(t, n) for t, n in zip(tables, lengths, strict=True)]
        return torch.stack(logits), FIRED.expand(2, len(tokens))

    def _write(self, table: Tensor, position: int, token: int) -> None:
        self.cache[table[position // PAGE], position % PAGE] = token

    def _logits(self, table: Tensor, length: int) -> Tensor:
        history = self.cache[table.long()].flatten()[:length].tolist()
        logits = torch.zeros(VOCAB)
        logits[following(history)] = 1
        return logits
