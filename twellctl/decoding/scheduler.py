"""Continuous batching: which sequences a step continues, which prompt is read between two steps.

A step is launched before the one before it is read, so that the device does not wait for the host.
When the rows change (a sequence comes, ends, needs a page that is not there) everything is read
first; then the host knows each row and sets all anew.

No threads here: whoever owns a `Scheduler` calls `advance` until nothing is left to do.
"""

import contextlib
import gc
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Tokens
from typing import TypeAlias

import numpy as np
import torch

from twellctl.decoding.batch import Batch, Step
from twellctl.decoding.decoder import Decoder
from twellctl.decoding.pages import PAGE, PagePool, pages_for
from twellctl.decoding.sampler import Variant
from twellctl.decoding.sequence import Sequence
from twellctl.serving.engine import EngineError, OutOfMemory, Sampling, Token

_SHORT_PROMPTS = 4  # that are read between two steps, at most
# what became of a sequence: a token, its failure, or None for its end
Event: TypeAlias = tuple[Sequence, Token | EngineError | None]


class Scheduler:
    """Continues sequences with a `decoder` whose cache is of `num_pages` pages (page 0 is lost)."""

    def __init__(
        self, decoder: Decoder, num_pages: int, max_running: int, eos_tokens: frozenset[int]
    ):
        self.decoder, self.eos_tokens = decoder, eos_tokens
        self.max_running = min(max_running, decoder.max_rows or max_running)
        self.context = min(decoder.context, (num_pages - 1) * PAGE)
        self.pool = PagePool(num_pages)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order of their rows
        self.prompt_tokens = self.generated_tokens = 0
        self.fired = np.zeros(decoder.num_layers)  # sums of shares, over all generated tokens
        self._entering: Sequence | None = None  # its prompt is being read
        self._under_way: tuple[Step, list[Sequence]] | None = None
        self._variant = Variant()
        self._changed = False
        self._settled = False  # the rows are ready for a step that was put off
        on_gpu = decoder.device.type == "cuda"
        self._on_stream = contextlib.nullcontext()
        if on_gpu:  # graphs are not captured on the default stream
            self._on_stream = torch.cuda.stream(torch.cuda.Stream(decoder.device))
        with torch.inference_mode():
            decoder.open_cache(num_pages)
            self._batch = Batch(decoder, self.max_running, pages_for(self.context))
        if on_gpu:
            torch.cuda.synchronize(decoder.device)  # all so far was done on another stream

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running or self._entering or self._under_way)

    @property
    def num_running(self) -> int:
        return len(self.running) + (self._entering is not None)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. `EngineError` if there is never room for it."""
        check_fits(sequence, self.context)
        self.waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Forget a sequence: nothing more is told of it, its pages are free for the next step."""
        if not sequence.gone:
            sequence.gone = self._changed = True
            self._settled = False
            if sequence in self.waiting:
                self.waiting.remove(sequence)

    def fail_all(self, error: EngineError) -> list[Event]:
        """End all there is with `error`."""
        events: list[Event] = []
        entering = [self._entering] if self._entering else []
        for sequence in [*self.running, *entering, *self.waiting]:
            self._end(sequence, events, error)
        self.waiting.clear()
        self._under_way, self._settled = None, False
        self._leave()
        return events

    def run(self, prompts: Tokens[Tokens[int]], sampling: Sampling) -> Iterator[list[Event]]:
        """Continue `prompts` in this thread: what became of them, step by step.

        Events name sequences whose `client` is the prompt's index.
        """
        mine = [Sequence(prompt, sampling, i) for i, prompt in enumerate(prompts)]
        try:
            for sequence in mine:
                self.add(sequence)
            while not all(sequence.gone for sequence in mine):
                yield self.advance()
        finally:
            for sequence in mine:
                self.cancel(sequence)
            self.advance()

    @torch.inference_mode()
    def advance(self) -> list[Event]:
        """Read prompts for a while or launch one step; what is known of steps before."""
        events: list[Event] = []
        with self._on_stream:
            begun = False
            if not self._settled and (self._changed or self._can_enter() or not self._can_go_on()):
                begun = self._settle(events)
            self._settled = begun  # nobody shall wait a step longer for a first token
            if self.running and not begun:
                self._launch(events)
        return events

    # ---- steps ----

    def _can_go_on(self) -> bool:
        """Whether the next step can be launched as the rows are; gives them the pages they need."""
        for row, sequence in enumerate(self.running):
            if sequence.all_launched:
                return False
            if sequence.needs_page:
                if (pages := self.pool.take(1)) is None:
                    return False
                self._batch.add_page(row, len(sequence.pages), pages[0])
                sequence.pages += pages
        return True

    def _launch(self, events: list[Event]) -> None:
        before, rows = self._under_way, self.running
        num_pages = max(len(sequence.pages) for sequence in rows)
        try:
            step = self._batch.launch(num_pages, self._variant)
        except Exception as error:
            self._read(events)
            self._blame(failure_of(error), events)
            return
        for sequence in rows:
            sequence.launched += 1
        self._under_way = before
        self._read(events)
        self._under_way = step, rows
        if not self._batch.reads_late:
            self._read(events)

    def _read(self, events: list[Event]) -> None:
        """Wait for the step under way, if there is one, and tell what it chose."""
        if self._under_way is None:
            return
        (step, rows), self._under_way = self._under_way, None
        try:
            records = step.read()
        except Exception as error:  # of the device: nothing that runs can be saved
            self._blame(EngineError(str(failure_of(error))), events)
            return
        self._count_fired(records, rows)
        for sequence, record in zip(rows, records, strict=True):
            sequence.launched -= 1
            if not sequence.gone:
                self._append(sequence, record, events)

    def _count_fired(self, records: np.ndarray, rows: list[Sequence]) -> None:
        if gone := [row for row, sequence in enumerate(rows) if sequence.gone]:
            records = np.delete(records, gone, axis=0)
        self.fired += records.view(np.float32)[:, self._batch.record.fired].sum(0)

    def _append(self, sequence: Sequence, record: np.ndarray, events: list[Event]) -> None:
        token = self._batch.record.token(record, sequence.sampling)
        sequence.tokens.append(token.id)
        self.generated_tokens += 1
        events.append((sequence, token))
        if token.id in self.eos_tokens or len(sequence.tokens) >= sequence.most_tokens:
            self._end(sequence, events)

    def _end(
        self, sequence: Sequence, events: list[Event], error: EngineError | None = None
    ) -> None:
        if not sequence.gone:
            sequence.gone = self._changed = True
            events.append((sequence, error))

    def _blame(self, failure: EngineError, events: list[Event]) -> None:
        """A step failed. For want of memory the youngest goes, else all that were in it."""
        blamed = [sequence for sequence in self.running if not sequence.gone]
        if isinstance(failure, OutOfMemory):
            blamed = sorted(blamed, key=lambda sequence: sequence.number)[-1:]
        for sequence in blamed:
            self._end(sequence, events, failure)
        self._changed = True
        self._free_memory(failure)

    # ---- rows ----

    def _settle(self, events: list[Event]) -> bool:
        """With nothing under way: let sequences go and come, give pages, set the rows anew.

        Returns whether one came.
        """
        self._read(events)
        self._leave()
        before = len(self.running)
        self._read_prompts(events)
        begun = len(self.running) > before
        self._give_pages()
        self._variant = Variant()
        for sequence in self.running:
            self._variant |= sequence.variant
        self._batch.load([s.fields() for s in self.running], [s.pages for s in self.running])
        self._changed = False
        return begun

    def _leave(self) -> None:
        entering = [self._entering] if self._entering else []
        for sequence in [*self.running, *entering]:
            if sequence.gone:
                self.pool.give_back(sequence.pages)
        self.running = [sequence for sequence in self.running if not sequence.gone]
        if self._entering and self._entering.gone:
            self._entering = None

    def _give_pages(self) -> None:
        """A page to each row that needs one, the oldest first, if need be from the youngest."""
        for sequence in sorted(self.running, key=lambda sequence: sequence.number):
            while sequence.pages and sequence.needs_page:
                if pages := self.pool.take(1):
                    sequence.pages += pages
                else:
                    self._evict()

    def _evict(self) -> None:
        """Take the pages of the youngest, which waits again, before all others."""
        holders = [*self.running, self._entering] if self._entering else self.running
        youngest = max(holders, key=lambda sequence: sequence.number)
        self.pool.give_back(youngest.pages)
        youngest.cached = 0
        if youngest is self._entering:
            self._entering = None
        else:
            self.running.remove(youngest)
        self.waiting.appendleft(youngest)

    # ---- prompts ----

    def _can_enter(self) -> bool:
        """Whether there is a prompt to read: one half read, or room for the first that waits."""
        if self._entering:
            return True
        if not self.waiting or len(self.running) >= self.max_running:
            return False
        # those that run may need a page each before this one is through
        needed = pages_for(len(self.waiting[0].tokens)) + len(self.running)
        return self.pool.free >= min(needed, self.pool.capacity)

    def _read_prompts(self, events: list[Event]) -> None:
        """Read about a chunk of prompts: a few short ones, or a part of a long one."""
        spent, chunk = 0, self.decoder.prefill_chunk
        while spent < chunk and self._can_enter():
            sequence = self._entering or self._entered()
            try:
                # what is short takes its time too
                spent += max(self._read_chunk(sequence, events), chunk // _SHORT_PROMPTS)
            except Exception as error:
                self._end(sequence, events, failure := failure_of(error))
                self._free_memory(failure)
            self._leave()

    def _entered(self) -> Sequence:
        self._entering = sequence = self.waiting.popleft()
        sequence.pages += self.pool.take(pages_for(len(sequence.tokens)))
        return sequence

    def _read_chunk(self, sequence: Sequence, events: list[Event]) -> int:
        """Read on in a prompt; the last chunk gives its first token. How many tokens were read.

        Where chunks begin hangs on the prompt alone: so do the bits of what is cached.
        """
        start = sequence.cached
        chunk = sequence.tokens[start : start + self.decoder.prefill_chunk]
        end = start + len(chunk)
        device = self.decoder.device
        tokens = torch.tensor(chunk, dtype=torch.int32, device=device)
        pages = sequence.pages[: pages_for(end)]
        table = torch.tensor(pages, dtype=torch.int32, device=device)
        logits, fired = self.decoder.prefill(tokens, start, table)
        sequence.cached = end
        if end == len(sequence.tokens):
            record = self._batch.first(logits, fired, sequence.fields(), sequence.variant)
            if end == sequence.num_prompt:
                self.prompt_tokens += end
            self.running.append(sequence)
            self._entering = None
            self._count_fired(record[None], [sequence])
            self._append(sequence, record, events)
        return len(chunk)

    def _free_memory(self, failure: EngineError) -> None:
        if isinstance(failure, OutOfMemory):
            gc.collect()
            torch.cuda.empty_cache()


def check_fits(sequence: Sequence, context: int) -> None:
    """`EngineError` if a sequence is empty or can become longer than there is ever room for."""
    if not sequence.num_prompt or sequence.sampling.max_tokens < 1:
        raise EngineError("a generation needs at least one token before it and one to make")
    if sequence.most_tokens > context:
        prompt, budget = sequence.num_prompt, sequence.sampling.max_tokens
        raise EngineError(
            f"a prompt of {prompt} tokens and max_tokens {budget} need room for {prompt + budget} "
            f"tokens, there is room for {context}: shorten the prompt or lower max_tokens"
        )


def failure_of(error: Exception) -> EngineError:
    """The same as an engine's error, which holds no frame and so no tensor."""
    text = " ".join(str(error).split())
    # the CPU's allocator raises a plain RuntimeError
    no_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if no_memory or "can't allocate memory" in text:
        return OutOfMemory("out of memory: shorten the prompt or lower max_tokens")
    return EngineError(f"{type(error).__name__}: {text}")
