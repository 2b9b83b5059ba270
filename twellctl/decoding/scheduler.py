"""Continuous batching: which sequences a step continues, which prompt is read between two steps.

A step is launched before the one before it is read, so that the device does not wait for the host.
When the rows change (a sequence comes, ends, needs a page that is not there) everything is read
first; then the host knows each row and sets all anew.

No threads here: whoever owns a `Scheduler` calls `advance` until nothing is left to do.
"""

import contextlib
import functools
import gc
import operator
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Tokens
from typing import TypeAlias

import numpy as np
import torch

from twellctl.bundle.twell_spec import PAGE
from twellctl.decoding.batch import Batch, Step
from twellctl.decoding.decoder import Decoder
from twellctl.decoding.engine import EngineError, OutOfMemory, Sampling, Token
from twellctl.decoding.pages import PagePool, pages_for
from twellctl.decoding.sampler import Variant
from twellctl.decoding.sequence import Sequence
from twellctl.decoding.torch_decoder import padded

NO_NUMBERS = (
    "the model computed NaN in place of the next token's probabilities: change the prompt; if all "
    "prompts fail so, the model is broken or its dtype too narrow"
)
# what became of a sequence: a token, its failure, or None for its end
Event: TypeAlias = tuple[Sequence, Token | EngineError | None]


class Scheduler:
    """Continues sequences with a `decoder` whose cache has `num_pages` pages (page 0 is lost)."""

    prompts_together = 16  # read between two steps, at most

    def __init__(
        self, decoder: Decoder, num_pages: int, max_running: int, eos_tokens: frozenset[int]
    ):
        self.decoder, self.eos_tokens = decoder, eos_tokens
        self.max_running = min(max_running, decoder.max_rows or max_running, num_pages - 1)
        self.context = min(decoder.context, (num_pages - 1) * PAGE)
        self.pool = PagePool(num_pages)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order of their rows
        self.prompt_tokens = self.generated_tokens = 0
        self.failed = 0  # generations in a row, not for want of memory
        self.fired = np.zeros(len(decoder.neurons))  # sums of shares, over all generated tokens
        self._entering: list[Sequence] = []  # whose prompts are being read
        self._under_way: tuple[Step, list[Sequence]] | None = None
        self._variant = Variant()
        self._changed = False
        self._settled = False  # the rows are ready for a step that was put off
        on_gpu = decoder.device.type == "cuda"
        self._on_stream = contextlib.nullcontext()
        if on_gpu:  # graphs are not captured on the default stream
            self._on_stream = torch.cuda.stream(torch.cuda.Stream(decoder.device))
        with torch.inference_mode():
            self._batch = Batch(decoder, self.max_running, pages_for(self.context))
        if on_gpu:
            torch.cuda.synchronize(decoder.device)  # all so far was done on another stream

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running or self._entering or self._under_way)

    @property
    def num_running(self) -> int:
        """Sequences that have not ended; rows of others are freed before the next ones enter."""
        return sum(not sequence.gone for sequence in [*self.running, *self._entering])

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
        for sequence in [*self.running, *self._entering, *self.waiting]:
            self._end(sequence, events, error)
        self.waiting.clear()
        self._under_way, self._settled = None, False
        self._leave()
        return events

    def run(
        self, prompts: Tokens[Tokens[int]], sampling: Sampling
    ) -> Iterator[list[tuple[Sequence, Token]]]:
        """Continue `prompts` in this thread: their tokens, step by step.

        The `client` of a sequence is the prompt's index. Raises the first `EngineError`.
        """
        mine = [Sequence(prompt, sampling, i) for i, prompt in enumerate(prompts)]
        try:
            for sequence in mine:
                self.add(sequence)
            while not all(sequence.gone for sequence in mine):
                events = self.advance()
                yield [(whose, event) for whose, event in events if isinstance(event, Token)]
                for _, event in events:
                    if isinstance(event, EngineError):
                        raise event
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
        if any(sequence.guide for sequence in self.running):
            self._read(events)  # what may be next depends on it
            if self._changed:
                return
            guided = [(row, s.guide) for row, s in enumerate(self.running) if s.guide]
            self._batch.allow({row: guide.compute_bitmask() for row, guide in guided})
        before, rows = self._under_way, self.running
        num_pages = max(len(sequence.pages) for sequence in rows)
        failure = None
        try:
            step = self._batch.launch(num_pages, self._variant)
        except Exception as error:  # which holds tensors up to here
            failure = failure_of(error)
        if failure:
            self._read(events)
            self._blame(failure, events)
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
        self.fired += self._batch.record.shares(records).sum(0)

    def _append(self, sequence: Sequence, record: np.ndarray, events: list[Event]) -> None:
        token = self._batch.record.token(record, sequence.sampling)
        if token is None:
            self._end(sequence, events, EngineError(NO_NUMBERS))
            return
        sequence.tokens.append(token.id)
        self.generated_tokens += 1
        self.failed = 0
        events.append((sequence, token))
        ended = token.id in self.eos_tokens and not sequence.sampling.ignore_eos
        if sequence.guide and not ended and not sequence.guide.consume_token(token.id):
            self._end(sequence, events, EngineError(f"token {token.id} is not allowed here"))
        if ended or len(sequence.tokens) >= sequence.most_tokens:
            self._end(sequence, events)

    def _end(
        self, sequence: Sequence, events: list[Event], error: EngineError | None = None
    ) -> None:
        if not sequence.gone:
            sequence.gone = self._changed = True
            self.failed += error is not None and not isinstance(error, OutOfMemory)
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
        if self._can_enter():
            if not self._entering:
                self._enter()
            self._read_prompts(self._entering, events)
            self._leave()
        begun = len(self.running) > before
        self._give_pages()
        self._variant = variant_of_all(self.running)
        rows = ([s.fields() for s in self.running], [s.pages for s in self.running])
        self._batch.load(*rows, [s.told() for s in self.running])
        self._changed = False
        return begun

    def _leave(self) -> None:
        for sequence in [*self.running, *self._entering]:
            if sequence.gone:
                self.pool.give_back(sequence.pages)
        self.running = [sequence for sequence in self.running if not sequence.gone]
        self._entering = [sequence for sequence in self._entering if not sequence.gone]

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
        youngest = max([*self.running, *self._entering], key=lambda sequence: sequence.number)
        self.pool.give_back(youngest.pages)
        youngest.cached = 0
        (self._entering if youngest in self._entering else self.running).remove(youngest)
        self.waiting.appendleft(youngest)

    # ---- prompts ----

    def _can_enter(self) -> bool:
        """Whether there is a prompt to read: one half read, or room for the first that waits."""
        return bool(self._entering) or self._has_room()

    def _has_room(self) -> bool:
        if not self.waiting or self.num_running >= self.max_running:
            return False
        # those that run may need a page each before this one is through
        needed = pages_for(len(self.waiting[0].tokens)) + self.num_running
        return self.pool.free >= min(needed, self.pool.capacity)

    def _enter(self) -> None:
        """Let the first come that waits, and those behind it that one forward reads with it."""
        longest = total = 0
        while self._has_room() and len(self._entering) < self.prompts_together:
            length = len(self.waiting[0].tokens)
            longest, total = max(longest, length), total + length
            filled_up = (len(self._entering) + 1) * longest
            if self._entering and filled_up > min(self.decoder.prefill_chunk, 2 * total):
                break
            sequence = self.waiting.popleft()
            sequence.pages += self.pool.take(pages_for(length))
            self._entering.append(sequence)

    def _read_prompts(self, sequences: list[Sequence], events: list[Event]) -> None:
        """Read on in prompts, with one forward if it does not fail."""
        failure = None
        try:
            self._read_chunk(sequences, events)
        except Exception as error:  # which holds tensors up to here
            failure = failure_of(error)
        if not failure:
            return
        self._free_memory(failure)
        if len(sequences) == 1:
            self._end(sequences[0], events, failure)
        else:  # whose it was shows when each is read alone
            for sequence in sequences:
                self._read_prompts([sequence], events)

    def _read_chunk(self, sequences: list[Sequence], events: list[Event]) -> None:
        """All of several prompts or a chunk of one; the last chunk gives its first token.

        Where chunks begin depends on the prompt alone. So do the bits of its cache if it is read
        alone; prompts that are read together also depend on the shape of the batch.
        """
        ends = [min(len(s.tokens), s.cached + self.decoder.prefill_chunk) for s in sequences]
        parts = [
            (sequence.tokens[sequence.cached : end], sequence.cached, sequence.pages)
            for sequence, end in zip(sequences, ends, strict=True)
        ]
        is_last = ends[0] == len(sequences[0].tokens)
        logits, fired = self.decoder.run(*padded(parts), last=int(is_last))
        if not is_last:
            sequences[0].cached = ends[0]
            return
        variant = variant_of_all(sequences)
        told = [s.told() for s in sequences]
        fields = [s.fields() for s in sequences]
        records = self._batch.first(logits[:, 0], fired[..., 0], fields, variant, told)
        self._entering = [s for s in self._entering if s not in sequences]
        self.running += sequences
        self._count_fired(records, sequences)
        for sequence, record, end in zip(sequences, records, ends, strict=True):
            sequence.cached = end
            if end == sequence.num_prompt:
                self.prompt_tokens += end
            self._append(sequence, record, events)

    def _free_memory(self, failure: EngineError) -> None:
        if isinstance(failure, OutOfMemory):
            gc.collect()
            torch.cuda.empty_cache()


def variant_of_all(sequences: list[Sequence]) -> Variant:
    """What must be computed for some of them."""
    return functools.reduce(operator.or_, (s.variant for s in sequences), Variant())


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
