"""The seam between the engine and a model: new tokens of some rows in, logits out.

The engine knows sequences, pages and sampling; a `Decoder` knows the model and uses a cache that it
is given. All calls come from one thread, under `torch.inference_mode`, on torch's current stream.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from twellctl.bundle.twell_launch import KernelSet
from twellctl.decoding.paged_cache import LayerShape, PagedCache


def buckets(max_rows: int) -> list[int]:
    """The numbers of rows that rounds are made for: powers of two, and `max_rows` itself."""
    return sorted({1 << i for i in range(max_rows.bit_length())} | {max_rows})


class Wanted(Enum):
    """What logits are good for. A decoder may give better ones."""

    EXACT = "exact"  # anything
    CHOICE = "choice"  # the largest, which is exact; others are near to what they are, and below it
    ROUGH = "rough"  # drafts: all are near to what they are


class Decoder(Protocol):
    """One model over a key-value cache in pages (paged_cache.py)."""

    device: torch.device
    vocab_size: int
    context: int  # tokens of a sequence, at most
    # of each of the L gated FFNs whose firing is reported; right from the first logits on
    neurons: Sequence[int]
    mapped: int  # of each, the last ones: they always fire, and reports leave them out
    shapes: Sequence[LayerShape]  # what each layer caches; empty: there is no cache in pages
    prefill_chunk: int  # tokens that a pass over prompts has at most, with those that fill up
    capturable: bool  # whether a pass with few tokens may be captured in a CUDA graph
    # whether what a pass with few tokens gives for each of them has the same bits with any others
    stable: bool

    @property
    def kernels(self) -> KernelSet | None:
        """Those with `choose`, which ends a round; None: torch ends it."""
        ...

    @property
    def max_rows(self) -> int | None:
        """Of a pass with one token a row; None: any number."""
        ...

    @property
    def most_rough(self) -> int:
        """Tokens of a pass, at most, whose logits may be less than exact; 0: they are exact."""
        ...

    def attach(self, cache: PagedCache) -> None:
        """Use `cache` from now on; called once, before `run`. Others may use it too.

        `ValueError` if it is a cache of other shapes.
        """
        ...

    def widths(self, max_pages: int) -> list[int]:
        """The widths W of tables for passes that are captured, ascending, `max_pages` the last.

        A decoder that reads no more of a table than its row needs has only that one.
        """
        ...

    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        tables: Tensor,
        last: int = 1,
        wanted: Wanted = Wanted.EXACT,
    ) -> tuple[Tensor, Tensor]:
        """One pass over Q consecutive tokens of each row: tokens and positions `[B, Q]`, tables
        `[B, W]`, int32, on the device or the host.

        With Q = 1 it is a step, with more a part of a prompt or tokens to verify. A row writes its
        keys and values at its positions, and each token attends to what is cached before it, to the
        row's new tokens before it, and to itself. Cached values after a token's position may be
        anything, NaN too. A row with fewer than Q tokens is filled up on the left, there its
        positions are -1; each row has at least one token. Rows of `tables` may lie apart; entries
        after a row's last page are 0.

        Returns, of the `last` tokens of each row (0 to Q), the logits `[B, last, V]` and how many
        neurons fired, int32 `[L, B, last]`. Where Q = 1 or `last` = Q, inputs on the device are not
        read by the host: the call may be captured in a CUDA graph.
        """
        ...
