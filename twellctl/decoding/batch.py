"""The rows of a decoder's rounds on its device: inputs, records of what was chosen, CUDA graphs.

A round (rounds.py) reads tokens, positions and tables from buffers that stay where they are, and
writes the last tokens it chose and the positions after them back there: the next round needs
nothing from the host. What the host wants to know of a round is one record for each token that was
read, written to its memory, or copied there after the round, and read later. On a GPU a round is
captured once for each (bucket of rows, width of tables, variant of sampling, logits wanted).
"""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from twellctl.decoding.capture import captured
from twellctl.decoding.decoder import Decoder, Wanted, buckets
from twellctl.decoding.rounds import Drafter, Drafts, Round, inputs_of
from twellctl.decoding.sampler import Field, Variant
from twellctl.decoding.step_end import Record, StepEnd
from twellctl.decoding.weighing import Penalised, Weights

logger = logging.getLogger(__name__)
_WARM_UPS = 2
NO_DRAFTS = Drafts()
_IN_FLIGHT = 2  # rounds whose records a kernel can write to the host's memory


class Batch:
    """Up to `max_rows` rows with tables of up to `max_pages` pages.

    All its methods are called `on_stream`, not the default one of a GPU: none captures graphs there
    """

    @torch.inference_mode()
    def __init__(
        self,
        decoder: Decoder,
        max_rows: int,
        max_pages: int,
        in_flight: int = _IN_FLIGHT,
        drafters: Sequence[Drafter] = (),
        stream: torch.cuda.Stream | None = None,
    ):
        """`in_flight`: rounds whose records were not read yet, at most. `stream`: None: a new one;
        on a GPU all that use one decoder or cache have the same."""
        self.decoder, self._drafters = decoder, drafters
        # of a row and round, at most
        self.num_tokens = 1 + max((drafter.most_drafts for drafter in drafters), default=0)
        self.record = Record(decoder.neurons, decoder.vocab_size, decoder.mapped)
        device = decoder.device
        self._end = StepEnd(self.record, decoder.kernels, max_rows, device, self.num_tokens)
        self._on_gpu = device.type == "cuda"
        self.reads_late = self._on_gpu  # elsewhere a round is through when it was launched
        self._buckets, self._widths = buckets(max_rows), decoder.widths(max_pages)
        self._num_rows = 0
        self._host_fields = self._on_host(len(Field), max_rows)
        self._host_tables = self._on_host(max_rows, max_pages)
        self._fields = self._host_fields.to(device, copy=True)
        self._tables = self._host_tables.to(device, copy=True)
        size = max_rows, self.num_tokens, self.record.width
        self._records = torch.zeros(size, dtype=torch.int32, device=device)
        self._records_on_host = self._on_host(in_flight, *size)
        self._slot = 0  # of those, the next round's; Field.SLOT says the same
        self._weights: Weights | None = None  # made for the first rows that need them
        self._grown: list[int] = []
        self._runs: dict[tuple[int, int, Variant, Wanted, Drafts], Callable[[], None]] = {}
        self._captures = self._on_gpu and decoder.capturable
        self.num_graphs = 0  # captured so far
        self._uncaptured: set[Variant] = set()  # those that were tried in vain
        self._graph_memory = torch.cuda.graph_pool_handle() if self._captures else None
        self.on_stream: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if self._on_gpu:
            self.on_stream = torch.cuda.stream(stream or torch.cuda.Stream(device))
            torch.cuda.synchronize(device)  # all so far was done on another stream

    def load(
        self,
        fields: Sequence[np.ndarray],
        pages: Sequence[Sequence[int]],
        penalised: Sequence[Penalised | None] = (),
        texts: Sequence[list[int]] = (),
    ) -> None:
        """Set the rows anew; no round may be under way. Fields as `fields_of` makes them; `texts`:
        their tokens, for drafters."""
        for drafter in self._drafters:
            drafter.load(texts)
        if any(penalised):
            if self._weights is None:
                size = len(self._records), self.decoder.vocab_size
                self._weights = Weights.of(*size, self.decoder.device)
            self._weights.load(penalised)
        self._num_rows = len(fields)
        of_rows, tables = self._host_fields.numpy(), self._host_tables.numpy()
        of_rows[:], tables[:] = 0, 0
        for row, (values, taken) in enumerate(zip(fields, pages, strict=True)):
            of_rows[:, row] = values
            tables[row, : len(taken)] = taken
        self._grown.clear()
        self._slot = 0
        self._fields.copy_(self._host_fields, non_blocking=True)
        self._tables.copy_(self._host_tables, non_blocking=True)

    def put(
        self, rows: Sequence[int], fields: Sequence[np.ndarray], pages: Sequence[Sequence[int]]
    ) -> None:
        """Set some `rows` anew, after the rounds under way. Rows without pages are nobody's."""
        new = self._on_host(len(rows), len(Field) + 1 + self._tables.shape[1])
        for values, row, of_row, taken in zip(new.numpy(), rows, fields, pages, strict=True):
            values[: len(Field) + 1] = [*of_row, row]
            values[len(Field) + 1 :][: len(taken)] = taken
        new = new.to(self.decoder.device, non_blocking=True)
        there = new[:, len(Field)]
        self._fields[:, there] = new[:, : len(Field)].T
        self._tables[there] = new[:, len(Field) + 1 :]
        self._num_rows = max(self._num_rows, 1 + max(rows))

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these `rows` alone, in this order, after the rounds under way."""
        self._num_rows = len(rows)
        there = self._on_host(len(rows))
        there.numpy()[:] = rows
        there = there.to(self.decoder.device, non_blocking=True)
        for of_rows, dim in ((self._fields, 1), (self._tables, 0)):
            kept = of_rows.index_select(dim, there)
            of_rows.zero_().narrow(dim, 0, len(rows)).copy_(kept)

    def allow(self, allowed: Mapping[int, bytes]) -> None:
        """Of some rows that were loaded with a guide: what may be next; no round is under way."""
        if allowed:
            self._loaded_weights().allow(allowed)

    def add_page(self, row: int, place: int, page: int) -> None:
        """One more page of a row, for the rounds to come."""
        self._host_tables.numpy()[row, place] = page
        self._grown.append(row)

    @property
    def most_drafts(self) -> list[int]:
        """How many drafts of each drafter a row may have in a round of the rows there are."""
        B, most_tokens = self._bucket, self.decoder.max_rows
        room = self.num_tokens if most_tokens is None else max(0, most_tokens // B - 1)
        return [
            0 if (drafter.max_rows or B) < B else min(drafter.most_drafts, room)
            for drafter in self._drafters
        ]

    def launch(self, num_pages: int, variant: Variant, drafts: Drafts = NO_DRAFTS) -> Round:
        """Start a round of all rows; none of them has more than `num_pages` pages.

        Each row reads its next token and `drafts`, up to `most_drafts`.
        """
        self._bring_tables()
        B, W = self._bucket, next(width for width in self._widths if width >= num_pages)
        wanted = self._wanted(variant, B * (1 + drafts.num))
        key = (B, W, self._end.kind_of(variant), wanted, drafts)
        if (run := self._runs.get(key)) is None:
            run = self._runs[key] = self._prepared(*key)
        first, began = self._event() if self._drafters else None, time.perf_counter()
        run()
        return self._followed(B, variant, drafts, first, began)

    @property
    def _bucket(self) -> int:
        return next(bucket for bucket in self._buckets if bucket >= self._num_rows)

    def _wanted(self, variant: Variant, num_tokens: int) -> Wanted:
        """What is done with the logits of a round that reads so many tokens."""
        chooses = num_tokens <= self.decoder.most_rough and not any(variant)
        return Wanted.CHOICE if chooses else Wanted.EXACT

    def first(
        self,
        logits: Tensor,
        fired: Tensor,
        fields: Sequence[np.ndarray],
        variant: Variant,
        penalised: Sequence[Penalised | None] = (),
    ) -> np.ndarray:
        """Choose the tokens after prompts from logits `[B, 1, V]`, `fired` `[L, B, 1]`; records
        `[B, 1, width]`. Waits."""
        of_rows = torch.from_numpy(np.stack(fields, 1)).to(self.decoder.device)
        records = torch.zeros_like(self._records[: len(logits), :1])
        weights = None
        if variant.weighed:
            weights = Weights.of(len(logits), logits.shape[-1], logits.device)
            weights.load(penalised)
        self._end(logits, fired, inputs_of(of_rows, None), of_rows, records, variant, weights)
        return records.cpu().numpy()

    def _writes_to_host(self, variant: Variant) -> bool:
        return len(self._records_on_host) == _IN_FLIGHT and self._end.writes_to_host(variant)

    def _on_host(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, pin_memory=self._on_gpu)

    def _bring_tables(self) -> None:
        # The host adds pages to its tables while an older copy may be under way: that is no race
        # that matters, since rounds launched before do not look at the new places.
        if len(self._grown) > 1:
            rows = slice(self._num_rows)
            self._tables[rows].copy_(self._host_tables[rows], non_blocking=True)
        elif self._grown:
            self._tables[self._grown[0]].copy_(self._host_tables[self._grown[0]], non_blocking=True)
        self._grown.clear()

    def _event(self) -> torch.cuda.Event | None:
        """One that comes after all so far, on a GPU; who drafts wants to know when that was."""
        if not self._on_gpu:
            return None
        event = torch.cuda.Event(enable_timing=bool(self._drafters))
        event.record()
        return event

    def _followed(
        self,
        B: int,
        variant: Variant,
        drafts: Drafts,
        first: torch.cuda.Event | None,
        began: float,
    ) -> Round:
        """The round just launched, with the copy of its records after it, if it needs one."""
        on_host = self._records_on_host[self._slot]
        self._slot = (self._slot + 1) % len(self._records_on_host)
        if not self._writes_to_host(variant):
            on_host[:B].copy_(self._records[:B], non_blocking=True)
        events, seconds = (first, self._event()), time.perf_counter() - began
        return Round(self._num_rows, drafts, on_host, events, seconds)

    def _round(self, B: int, W: int, variant: Variant, wanted: Wanted, drafts: Drafts) -> None:
        fields, tables = self._fields[:, :B], self._tables[:B, :W]
        weights = self._loaded_weights().first(B) if variant.weighed else None
        proposed = None
        if drafts.num:
            how = drafts.num, variant, weights
            proposed = self._drafters[drafts.drafter].draft(fields, tables, *how)
        inputs = inputs_of(fields, proposed)
        for drafter in self._drafters:
            drafter.follow(*inputs)
        Q = inputs[0].shape[1]
        logits, fired = self.decoder.run(*inputs, tables, last=Q, wanted=wanted)
        records = self._records_on_host if self._writes_to_host(variant) else self._records
        of_rows = records[..., :B, :Q, :]
        self._end(logits, fired, inputs, fields, of_rows, variant, weights)

    def _loaded_weights(self) -> Weights:
        if self._weights is None:
            raise ValueError("no row was loaded with penalties, biases or a guide")
        return self._weights

    def _prepared(
        self, B: int, W: int, variant: Variant, wanted: Wanted, drafts: Drafts
    ) -> Callable[[], None]:
        """The round as a CUDA graph, or as it is where there are none."""
        run = partial(self._round, B, W, variant, wanted, drafts)
        if not self._captures or variant in self._uncaptured:
            return run
        for _ in range(_WARM_UPS):
            self._rehearse(run)
        try:
            graph = captured(run, self._graph_memory, self.decoder.device)
        except Exception as error:
            if not self._uncaptured:
                said = " ".join(str(error).split())[:200]
                logger.warning("steps are slow, because no CUDA graph could be captured: %s", said)
            if not isinstance(error, torch.OutOfMemoryError):  # that may be another time
                self._uncaptured.add(variant)
            return run
        self.num_graphs += 1
        return graph.replay

    def _rehearse(self, run: Callable[[], None]) -> None:
        """A round after which the rows stand where they stood; it caches what the next one will."""
        stand = [self._fields, *(part for drafter in self._drafters for part in drafter.stand)]
        if self._weights is not None:
            stand.append(self._weights.written)
        kept = [part.clone() for part in stand]
        run()
        for part, before in zip(stand, kept, strict=True):
            part.copy_(before)
