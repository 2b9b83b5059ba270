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
    """A `Decoder` on the CPU; `calls` has its passes: ("step", rows) with one token a row, and
    ("prefill", start and end of each row) with more, or of which no logits are wanted."""

    device = torch.device("cpu")
    vocab_size = VOCAB
    context = 1024
    neurons, mapped = (4, 8), 0
    kernels = None
    shapes = ()
    max_rows = None
    prefill_chunk = 100
    capturable = False

    def __init__(self, num_pages: int = 40):
        self.calls: list[tuple] = []
        self.cache = torch.full((num_pages, PAGE), -1)

    def attach(self, cache) -> None:
        """It has a cache of its own."""

    def widths(self, max_pages: int) -> list[int]:
        return sorted({1, max_pages})

    def run(
        self, tokens: Tensor, positions: Tensor, tables: Tensor, last: int = 1
    ) -> tuple[Tensor, Tensor]:
        (B, Q), ends = tokens.shape, (positions[:, -1] + 1).tolist()
        if Q == 1 and last == 1:
            self.calls.append(("step", B))
        else:
            assert tokens.numel() <= self.prefill_chunk
            starts = positions.masked_fill(positions < 0, self.context).amin(1).tolist()
            spans = zip(starts, ends, strict=True)
            self.calls.append(("prefill", *(at for span in spans for at in span)))
        for row, place in (positions >= 0).nonzero().tolist():
            self._write(tables[row], int(positions[row, place]), int(tokens[row, place]))
        logits = [
            self._logits(table, end - last + 1 + i)
            for table, end in zip(tables, ends, strict=True)
            for i in range(last)
        ]
        size = (B, last, VOCAB)
        made = torch.stack(logits).view(size) if logits else torch.empty(size)
        return made, FIRED[..., None].expand(2, B, last)

    def _write(self, table: Tensor, position: int, token: int) -> None:
        self.cache[table[position // PAGE], position % PAGE] = token

    def _logits(self, table: Tensor, length: int) -> Tensor:
        history = self.cache[table.long()].flatten()[:length].tolist()
        logits = torch.zeros(VOCAB)
        logits[following(history)] = 1
        return logits
