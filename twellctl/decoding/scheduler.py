"""Continuous batching: which sequences a round continues, which prompt is read between two rounds.

A round is launched before the one before it is read, so that the device does not wait for the host.
When the rows change (a sequence comes, ends, needs a page that is not there) everything is read
first; then the host knows each row and sets all anew.

No threads here: whoever owns a `Scheduler` calls `advance` until nothing is left to do.
"""

import functools
import gc
import operator
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Tokens
from itertools import repeat
from typing import TypeAlias

import numpy as np
import torch

from twellctl.bundle.twell_spec import PAGE
from twellctl.decoding.batch import Batch
from twellctl.decoding.decoder import Decoder
from twellctl.decoding.drafted import Draft
from twellctl.decoding.engine import EngineError, GuideError, OutOfMemory, Sampling, Token
from twellctl.decoding.pages import PagePool, pages_for
from twellctl.decoding.rounds import (
    NOT_KEPT,
    Drafter,
    Drafts,
    Round,
    chosen_in,
    records_of,
)
from twellctl.decoding.sampler import Variant
from twellctl.decoding.sequence import Sequence
from twellctl.decoding.tally import Tally
from twellctl.decoding.torch_decoder import padded

PROMPTS_TOGETHER = 16
_READ_AGAIN = 8  # tokens of an answer, in one pass
NO_NUMBERS = (
    "the model computed NaN in place of the next token's probabilities: change the prompt; if all "
    "prompts fail so, the model is broken or its dtype too narrow"
)
# what became of a sequence: a token, its failure, or None for its end
Event: TypeAlias = tuple[Sequence, Token | EngineError | None]


class Scheduler:
    """Continues sequences with a `decoder` over a cache that has the pages of `pool`."""

    def __init__(
        self,
        decoder: Decoder,
        pool: PagePool,
        max_running: int,
        eos_tokens: frozenset[int],
        drafters: Tokens[Drafter] = (),
        drafts: Drafts | None = None,
        stream: torch.cuda.Stream | None = None,
    ):
        """`drafts`: those of each round, if there is room; None: as many as pay (pace.py).

        Several over one cache, in one thread, have one `pool` and one `stream`; None: a new one.
        """
        self.decoder, self.eos_tokens = decoder, eos_tokens
        self.max_running = min(max_running, decoder.max_rows or max_running, pool.capacity)
        # prompts that are read between two rounds, at most
        self.prompts_together = 1 if decoder.stable else PROMPTS_TOGETHER
        self.context = min(decoder.context, pool.capacity * PAGE)
        self.pool = pool
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order of their rows
        self.prompt_tokens = self.generated_tokens = 0
        self.tally = Tally(drafters, drafts)
        self.failed = 0  # generations in a row, not for want of memory, nor by their guides
        self.fired = np.zeros(len(decoder.neurons))  # sums of shares, over all generated tokens
        self._entering: list[Sequence] = []  # whose prompts are being read
        self._events: list[Event] = []  # that the advance under way, or one that failed, has found
        self._under_way: tuple[Round, list[Sequence]] | None = None
        self._variant = Variant()
        self._changed = False
        self._settled = False  # the rows are ready for a round that was put off
        pages = pages_for(self.context)
        self._batch = Batch(decoder, self.max_running, pages, drafters=drafters, stream=stream)

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
        """Forget a sequence: it has no more events, its pages are free for the next round."""
        if not sequence.gone:
            sequence.gone = self._changed = True
            self._settled = False
            if sequence in self.waiting:
                self.waiting.remove(sequence)

    def fail_all(self, error: EngineError) -> list[Event]:
        """End all there is with `error`; what an advance that failed had found comes first."""
        events, self._events = self._events, []
        for sequence in [*self.running, *self._entering, *self.waiting]:
            self._end(sequence, events, error)
        self.waiting.clear()
        self._under_way, self._settled = None, False
        self._leave()
        return events

    def run(
        self, prompts: Tokens[Tokens[int]], sampling: Sampling
    ) -> Iterator[list[tuple[Sequence, Token]]]:
        """Continue `prompts` in this thread: their tokens, round by round.

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
        """Read prompts for a while or launch one round; what is known of rounds before."""
        events = self._events
        with self._batch.on_stream:
            begun = False
            if not self._settled and (self._changed or self._can_enter() or not self._can_go_on()):
                begun = self._settle(events)
            self._settled = begun  # so that nobody waits a round longer for a first token
            if self.running and not begun:
                self._launch(events)
        self._events = []
        return events

    # ---- rounds ----

    def _can_go_on(self) -> bool:
        """Whether the next round can be launched as the rows are; gives them pages they need."""
        for row, sequence in enumerate(self.running):
            if sequence.all_launched:
                return False
            while sequence.needs_page(self._batch.num_tokens):
                if (pages := self.pool.take(1)) is None:
                    return False
                self._batch.add_page(row, len(sequence.pages), pages[0])
                sequence.pages += pages
        return True

    def _launch(self, events: list[Event]) -> None:
        guided = any(sequence.guide for sequence in self.running)
        if guided:
            self._read(events)  # what may be next depends on it
            if not self._changed:
                allowed = [self._allowed(sequence, events) for sequence in self.running]
                self._batch.allow({row: bits for row, bits in enumerate(allowed) if bits})
            if self._changed:
                return
        before, rows = self._under_way, self.running
        num_pages = max(len(sequence.pages) for sequence in rows)
        most = [] if guided else self._batch.most_drafts
        drafts = self.tally.choose(rows, most)
        failure = None
        try:
            launched = self._batch.launch(num_pages, self._variant, drafts)
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
        self._under_way = launched, rows
        if not self._batch.reads_late:
            self._read(events)

    def _read(self, events: list[Event]) -> None:
        """Wait for the round under way, if there is one, and report what it chose."""
        if self._under_way is None:
            return
        (launched, rows), self._under_way = self._under_way, None
        try:
            records = records_of([launched])
        except Exception as error:  # of the device: nothing that runs can be saved
            self._blame(EngineError(str(failure_of(error))), events)
            return
        for sequence in rows:
            sequence.launched -= 1
        drafted = self.tally.count(launched, records, rows)
        self._append(records, rows, events, drafted)

    def _append(
        self,
        records: np.ndarray,
        rows: list[Sequence],
        events: list[Event],
        drafted: Tokens[list[Draft] | None] | None = None,
    ) -> None:
        """Give the tokens of `records` `[rows, tokens, width]` to the sequences that go on;
        `drafted`: what is said of the tokens of each row (`Tally.count`)."""
        taken = []
        drafted = drafted or [None] * len(rows)
        each = zip(rows, chosen_in(records), records, drafted, strict=True)
        for sequence, chosen, of_row, drafts in each:
            if sequence.gone:
                continue
            before = len(sequence.tokens)
            new, is_broken = sequence.take(chosen, self.eos_tokens)
            self.tally.look_up(sequence, before)
            used = of_row if len(of_row) == 1 else of_row[of_row[:, 0] != NOT_KEPT]
            taken.append(used[: len(new)])
            self._report(sequence, taken[-1], events, drafts)
            if is_broken:
                self._end(sequence, events, EngineError(NO_NUMBERS))
            elif sequence.has_ended(self.eos_tokens):
                self._end(sequence, events)
        if taken:
            self.fired += self._batch.record.shares(np.concatenate(taken)).sum(0)

    def _report(
        self,
        sequence: Sequence,
        records: np.ndarray,
        events: list[Event],
        drafts: list[Draft] | None,
    ) -> None:
        """The sequence's new tokens, `records` `[tokens, width]`, until one is wrong."""
        for record, draft in zip(records, drafts or repeat(None), strict=False):
            token = self._batch.record.token(record, sequence.sampling, draft)
            if token is None:
                self._end(sequence, events, EngineError(NO_NUMBERS))
                return
            self.generated_tokens += 1
            self.failed = 0
            events.append((sequence, token))
            is_end = sequence.ends_with(token.id, self.eos_tokens)
            if not is_end and not self._follows(sequence, token.id, events):
                return

    # ---- guides: one that fails, if by a panic, ends its own sequence and no other ----

    def _allowed(self, sequence: Sequence, events: list[Event]) -> bytes | None:
        """What may be next, as `Guide.compute_bitmask` says it; None: anything, or it failed."""
        try:
            return sequence.guide.compute_bitmask() if sequence.guide else None
        except BaseException as error:
            self._end(sequence, events, _failure_of_guide(error))
            return None

    def _follows(self, sequence: Sequence, token: int, events: list[Event]) -> bool:
        """Whether its guide takes `token`, which was chosen; if not, the sequence ends."""
        failure: EngineError = GuideError(f"token {token} is not allowed here")
        try:
            if sequence.guide is None or sequence.guide.consume_token(token):
                return True
        except BaseException as error:
            failure = _failure_of_guide(error)
        self._end(sequence, events, failure)
        return False

    # ---- ends ----

    def _end(
        self, sequence: Sequence, events: list[Event], error: EngineError | None = None
    ) -> None:
        if not sequence.gone:
            sequence.gone = self._changed = True
            self.failed += error is not None and not isinstance(error, OutOfMemory | GuideError)
            events.append((sequence, error))

    def _blame(self, failure: EngineError, events: list[Event]) -> None:
        """A round failed. For want of memory the youngest goes, else all that were in it."""
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
        texts = [sequence.tokens for sequence in self.running]
        self._batch.load(*rows, [s.penalised() for s in self.running], texts)
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
            while sequence.pages and sequence.needs_page(self._batch.num_tokens):
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
        """Let the first one in that waits, and those after it that one forward reads with it."""
        longest = total = 0
        while self._has_room() and len(self._entering) < self.prompts_together:
            length = len(self.waiting[0].tokens)
            longest, total = max(longest, length), total + length
            filled_up = (len(self._entering) + 1) * longest
            if self._entering and filled_up > min(self.decoder.prefill_chunk, 2 * total):
                break
            if (pages := self.pool.take(pages_for(length))) is None:
                break
            sequence = self.waiting.popleft()
            sequence.pages += pages
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
        if self.decoder.stable and len(sequences[0].tokens) > sequences[0].num_prompt:
            self._read_again(sequences[0])
            return
        ends = [min(len(s.tokens), s.cached + self.decoder.prefill_chunk) for s in sequences]
        parts = [s.part(end) for s, end in zip(sequences, ends, strict=True)]
        is_last = ends[0] == len(sequences[0].tokens)
        logits, fired = self.decoder.run(*padded(parts), last=int(is_last))
        if not is_last:
            sequences[0].cached = ends[0]
            return
        variant = variant_of_all(sequences)
        penalised = [s.penalised(self._allowed(s, events)) for s in sequences]
        fields = [s.fields() for s in sequences]
        records = self._batch.first(logits, fired, fields, variant, penalised)
        self._entering = [s for s in self._entering if s not in sequences]
        self.running += sequences
        for sequence, end in zip(sequences, ends, strict=True):
            sequence.cached = end
            if end == sequence.num_prompt:
                self.prompt_tokens += end
        self._append(records, sequences, events)

    def _read_again(self, sequence: Sequence) -> None:
        """Read on in what lost its pages, by passes of the kinds that read it at first: so the same
        bits are cached."""
        first = sequence.cached
        if first < sequence.num_prompt:
            end = min(sequence.num_prompt, first + self.decoder.prefill_chunk)
            last = int(end == sequence.num_prompt)
        else:
            end = min(len(sequence.tokens) - 1, first + _READ_AGAIN)
            last = end - first
        self.decoder.run(*padded([sequence.part(end)]), last=last)
        sequence.cached = end
        if end == len(sequence.tokens) - 1:
            self._entering.remove(sequence)
            self.running.append(sequence)

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


def _failure_of_guide(error: BaseException) -> GuideError:
    """Raises `error` again if it is no failure, but an order to stop."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error
    if isinstance(error, GuideError):
        return error
    return GuideError(f"the grammar of this answer failed: {failure_of(error)}")


def failure_of(error: BaseException) -> EngineError:
    """The same as an engine's error, which holds no frame and so no tensor."""
    text = " ".join(str(error).split())
    # the CPU's allocator raises a plain RuntimeError
    no_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if no_memory or "can't allocate memory" in text:
        return OutOfMemory("out of memory: shorten the prompt or lower max_tokens")
    return EngineError(f"{type(error).__name__}: {text}")
