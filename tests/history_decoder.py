"""A decoder without a model: the next token is a checksum of all tokens and their places.

It keeps the tokens themselves in pages, so that a page lost, shared or mixed up, a token repeated
or left out gives other tokens than `expected`.
"""

from operator import mul

import torch
from torch import Tensor

from twellctl.decoding.decoder import Wanted
from twellctl.decoding.pages import PAGE
from twellctl.decoding.sampler import Field

VOCAB = 211
FIRED = torch.tensor([[1], [4]], dtype=torch.int32)


def checksum(tokens: list[int]) -> int:
    """The sum of each token, and 1, times 3, 10, 17 and so on."""
    factors = range(3, 7 * len(tokens) + 3, 7)
    return sum(map(mul, tokens, factors)) + sum(factors)


def following(total: int, length: int) -> int:
    """The token after `length` tokens, whose checksum is `total`."""
    return (total * 31 + length) % VOCAB


def expected(prompt: list[int], count: int, wrong: int = 0) -> list[int]:
    """`count` tokens after `prompt`; at each `wrong`-th place, if any, another one."""
    tokens, total = [], checksum(prompt)
    for place in range(len(prompt), len(prompt) + count):
        token = following(total, place)
        if wrong and place % wrong == 0:
            token = (token + 1) % VOCAB
        tokens.append(token)
        total += (token + 1) * (3 + 7 * place)
    return tokens


class HistoryDecoder:
    """A `Decoder` on the CPU; `calls` has its passes: ("step", rows) with one token a row,
    ("round", rows) with several that all get logits, else ("prefill", start and end of each row).
    """

    device = torch.device("cpu")
    vocab_size = VOCAB
    context = 1024
    neurons, mapped = (4, 8), 0
    kernels = None
    shapes = ()
    max_rows = None
    prefill_chunk = 100
    capturable = stable = False
    most_rough = 0

    def __init__(self, num_pages: int = 40):
        self.calls: list[tuple] = []
        self.cache = torch.full((num_pages, PAGE), -1)

    def attach(self, cache) -> None:
        """It has a cache of its own."""

    def widths(self, max_pages: int) -> list[int]:
        return sorted({1, max_pages})

    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        tables: Tensor,
        last: int = 1,
        wanted: Wanted = Wanted.EXACT,
    ) -> tuple[Tensor, Tensor]:
        (B, Q), ends = tokens.shape, (positions[:, -1] + 1).tolist()
        if last == Q:
            self.calls.append(("step" if Q == 1 else "round", B))
        else:
            assert tokens.numel() <= self.prefill_chunk
            starts = positions.masked_fill(positions < 0, self.context).amin(1).tolist()
            spans = zip(starts, ends, strict=True)
            self.calls.append(("prefill", *(at for span in spans for at in span)))
        self._write(tokens, positions, tables.long())
        logits = [
            self._logits(table, max(end - last + 1 + i, 0))
            for table, end in zip(tables, ends, strict=True)
            for i in range(last)
        ]
        size = (B, last, VOCAB)
        made = torch.stack(logits).view(size) if logits else torch.empty(size)
        return made, FIRED[..., None].expand(2, B, last)

    def _write(self, tokens: Tensor, positions: Tensor, tables: Tensor) -> None:
        rows, places = (positions >= 0).nonzero(as_tuple=True)
        at = positions[rows, places].long()
        self.cache[tables[rows, at // PAGE], at % PAGE] = tokens[rows, places].long()

    def history(self, table: Tensor, length: int) -> list[int]:
        """The first `length` tokens of a sequence."""
        return self.cache[table.long()].flatten()[:length].tolist()

    def _logits(self, table: Tensor, length: int) -> Tensor:
        logits = torch.zeros(VOCAB)
        history = self.history(table, length)
        logits[following(checksum(history), len(history))] = 1
        return logits


class HistoryDrafter:
    """Proposes what a `HistoryDecoder` writes, but for every `wrong`-th position of a sequence."""

    name = "history"
    stand = ()

    def __init__(self, decoder: HistoryDecoder, num_drafts: int, wrong: int):
        self.decoder, self.most_drafts, self.wrong = decoder, num_drafts, wrong
        self.passes, self.max_rows = 0, None

    def load(self, rows) -> None:
        """It reads the decoder's cache."""

    def follow(self, tokens, positions) -> None:
        """The decoder caches them."""

    def draft(self, fields: Tensor, tables: Tensor, count: int, *how) -> Tensor:
        self.passes += 1
        rows = zip(
            fields[Field.TOKEN].tolist(), fields[Field.POSITION].tolist(), tables, strict=True
        )
        return torch.tensor([self._after(*row, count) for row in rows], dtype=torch.int32)

    def _after(self, token: int, position: int, table: Tensor, count: int) -> list[int]:
        history = [*self.decoder.history(table, position), token]
        return expected(history, count, self.wrong)
