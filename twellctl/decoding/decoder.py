"""The seam between the engine and a model: a prompt or one token of many rows in, logits out.

The engine knows sequences, pages and sampling; a `Decoder` knows the model and holds the cache.
All calls come from one thread, under `torch.inference_mode`, on torch's current stream.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from twellctl.bundle.twell_launch import KernelSet


class Decoder(Protocol):
    """One model with its key-value cache, which lies in pages (pages.py)."""

    device: torch.device
    vocab_size: int
    context: int  # tokens of a sequence, at most
    # of each of the L gated FFNs whose firing is reported; right from the first prefill on
    neurons: Sequence[int]
    mapped: int  # of each, the last ones: they always fire, and are left out of what is told
    kernels: KernelSet | None  # with `choose`, by which a step may end; None: torch ends it
    page_bytes: int  # of one page, over all layers; 0: there is no cache in pages
    max_rows: int | None  # of one step; None: any number
    prefill_chunk: int  # tokens of one prefill, at most, those that only fill up too
    capturable: bool  # whether a step may be captured in a CUDA graph

    def open_cache(self, num_pages: int) -> None:
        """Allocate the cache; called once, before all else."""
        ...

    def widths(self, max_pages: int) -> list[int]:
        """The widths W that `step` is to be called with, ascending, `max_pages` the last.

        A decoder that reads no more of a table than its row needs has only that one.
        """
        ...

    def prefill(self, tokens: Tensor, positions: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        """Consecutive tokens of each row: tokens and positions `[B, P]`, tables `[B, W]`, int32.

        A row with fewer tokens than P is filled up on the left, there its positions are -1. What
        lies before a row's first position is cached; rows that are filled up begin at 0. Returns,
        of the last tokens, the logits `[B, V]` and how many neurons fired, int32 `[L, B]`.
        """
        ...

    def step(self, tokens: Tensor, positions: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        """One token of each row: tokens `[B]`, positions `[B]`, tables `[B, W]`, int32.

        Row b writes at `positions[b]` and attends to all up to there. Rows of `tables` may lie
        apart; entries behind a row's last page are 0. Cached values behind a row's position may
        be anything, NaN too. Returns logits `[B, V]` and how many neurons fired, int32 `[L, B]`. No
        host reads: the call may be captured in a CUDA graph.
        """
        ...
