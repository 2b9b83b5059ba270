"""What a pass over prompts reads, as it lies on the device (prompt_pass.py)."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from twellctl.bundle.twell_spec import PAGE
from twellctl.decoding.pages import pages_for
from twellctl.decoding.run_attention import Runs
from twellctl.decoding.transfers import pinned, to_device


@dataclass(frozen=True)
class Prompts:
    """The T tokens of all B rows: `tokens` and `positions` int32 `[T]`, a row's `tables` int32
    `[T, W]` for each of its tokens, `pages` int64 of all rows, and the places `wanted` int64
    `[B last]` of the tokens that get logits."""

    tokens: Tensor
    positions: Tensor
    tables: Tensor
    pages: Tensor
    wanted: Tensor
    runs: Runs

    @property
    def num_rows(self) -> int:
        return len(self.runs.lengths)

    @property
    def last(self) -> int:
        """Tokens of each row that get logits."""
        return len(self.wanted) // self.num_rows

    @classmethod
    def of(
        cls, tokens: Tensor, positions: Tensor, tables: Tensor, last: int, device: torch.device
    ) -> "Prompts":
        """Of what `Decoder.run` takes, on the host. What fills up short rows is left out."""
        tokens, positions, tables = (part.int() for part in (tokens, positions, tables))
        is_token = positions >= 0
        counts = is_token.sum(1)
        ends = counts.cumsum(0)
        lengths = positions[:, -1] + 1
        num_pages = [pages_for(length) for length in lengths.tolist()]
        keys = PAGE * F.pad(torch.tensor(num_pages).cumsum(0), (1, 0))
        pages = [table[:num] for table, num in zip(tables, num_pages, strict=True)]
        wanted = (ends[:, None] + torch.arange(-last, 0)).clamp(min=0).flatten()
        on = partial(to_device, device)
        return cls(
            on(tokens[is_token]),
            on(positions[is_token]),
            on(tables.repeat_interleave(counts, 0)),
            on(torch.cat(pages).long()),
            on(wanted),
            Runs(
                queries=on(F.pad(ends, (1, 0)).int()),
                keys=on(keys.int()),
                lengths=on(lengths.int()),
                most_queries=int(counts.max()),
                most_keys=PAGE * max(num_pages),
            ),
        )


class PromptInputs:
    """Where one prompt of up to `size` tokens and `width` pages lies, filled up on the left; its
    `last` tokens get logits."""

    def __init__(self, size: int, width: int, last: int, device: torch.device):
        self._size, self._width, self._device = size, width, device
        self._there = torch.zeros(2 * size + width + 1, dtype=torch.int32, device=device)
        ends = torch.tensor([[0, size], [0, width * PAGE]], dtype=torch.int32)
        self._queries, self._keys = to_device(device, ends)
        self._wanted = to_device(device, torch.arange(size - last, size))

    def load(self, tokens: Tensor, positions: Tensor, table: Tensor) -> None:
        """Of a prompt `[n]`, on the host, whose pages are in `table`."""
        size, num = self._size, len(tokens)
        values = torch.zeros(len(self._there), dtype=torch.int32)
        values[size - num : size] = tokens
        values[size : 2 * size] = -1
        values[2 * size - num : 2 * size] = positions
        values[2 * size :][: len(table)] = table
        values[-1] = positions[-1] + 1
        self._there.copy_(pinned(self._device, values), non_blocking=True)

    @property
    def prompts(self) -> Prompts:
        """What was loaded. Launches, if any, go into a graph."""
        size, width = self._size, self._width
        tokens, positions, table, lengths = self._there.split((size, size, width, 1))
        runs = Runs(self._queries, self._keys, lengths, size, width * PAGE)
        tables = table.expand(size, width)
        return Prompts(tokens, positions, tables, table.long(), self._wanted, runs)
