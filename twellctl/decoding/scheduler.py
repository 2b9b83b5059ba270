"""Continuous batching: which sequences a round continues, which prompt is read between two rounds.

A round is launched before the one before it is read, so that the device does not wait for the host.
When the rows change (a sequence comes, ends, needs a page that is not there) everything is read
first; then the host knows each row and sets all anew.

No threads here: whoever owns a `Scheduler` calls `advance` until nothing is left to do.
"""

import gc
from collections.abc import Iterator
from collections.abc import Sequence as Tokens

import torch

from twellctl.bundle.twell_spec import PAGE
from twellctl.decoding.admission import Admission
from twellctl.decoding.batch import Batch
from twellctl.decoding.decoder import Decoder
from twellctl.decoding.engine import EngineError, OutOfMemory, Sampling, Token
from twellctl.decoding.failures import failure_of
from twellctl.decoding.pages import PagePool, pages_for
from twellctl.decoding.reports import Event, Reports
from twellctl.decoding.rounds import Drafter, Drafts, Round, records_of
from twellctl.decoding.sampler import Variant
from twellctl.decoding.sequence import Sequence, check_fits, variant_of_all
from twellctl.decoding.tally import Tally
from twellctl.decoding.torch_decoder import padded

PROMPTS_TOGETHER = 16  # that are read between two rounds, at most
_READ_AGAIN = 8  # tokens of an answer, in one pass


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
        self.context = min(decoder.context, pool.capacity * PAGE)
        together = 1 if decoder.stable else PROMPTS_TOGETHER
        self.admission = Admission(pool, self.max_running, together)
        pages = pages_for(self.context)
        self._batch = Batch(decoder, self.max_running, pages, drafters=drafters, stream=stream)
        self.tally = Tally(drafters, drafts)
        self.reports = Reports(self._batch.record, eos_tokens, self.tally)
        self.prompt_tokens = 0
        self._under_way: tuple[Round, list[Sequence]] | None = None
        self._variant = Variant()
        self._settled = False  # the rows are ready for a round that was put off

    @property
    def num_graphs(self) -> int:
        """CUDA graphs of rounds that were captured so far, each where its first round waited."""
        return self._batch.num_graphs

    @property
    def busy(self) -> bool:
        return bool(self.admission.all or self._under_way)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. `EngineError` if there is never room for it."""
        check_fits(sequence, self.context)
        self.admission.waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Forget a sequence: it has no more events, its pages are free for the next round."""
        if not sequence.gone:
            sequence.gone = True
            self._settled = False
            if sequence in self.admission.waiting:
                self.admission.waiting.remove(sequence)

    def fail_all(self, error: EngineError) -> list[Event]:
        """End all there is with `error`; what an advance that failed had found comes first."""
        for sequence in self.admission.all:
            self.reports.end(sequence, error)
        self.admission.waiting.clear()
        self._under_way, self._settled = None, False
        self.admission.let_go()
        return self.reports.take()

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
        with self._batch.on_stream:
            begun = False
            if not self._settled and not self._can_go_on():
                begun = self._settle()
            self._settled = begun  # so that nobody waits a round longer for a first token
            if self.admission.running and not begun:
                self._launch()
        return self.reports.take()

    # ---- rounds ----

    def _can_go_on(self) -> bool:
        """Whether the next round can be launched as the rows are; gives them pages they need."""
        if self.admission.rows_changed or self.admission.can_enter:
            return False
        for row, sequence in enumerate(self.admission.running):
            if sequence.all_launched:
                return False
            while sequence.needs_page(self._batch.num_tokens):
                if (pages := self.admission.pool.take(1)) is None:
                    return False
                self._batch.add_page(row, len(sequence.pages), pages[0])
                sequence.pages += pages
        return True

    def _launch(self) -> None:
        rows = self.admission.running
        guided = any(sequence.guide for sequence in rows)
        if guided and not self._mask(rows):
            return
        num_pages = max(len(sequence.pages) for sequence in rows)
        under_way = self._under_way and self._under_way[0]
        most = [] if guided else self._batch.most_drafts
        drafts = self.tally.choose(rows, most, under_way)
        failure = None
        try:
            launched = self._batch.launch(num_pages, self._variant, drafts)
        except Exception as error:  # which holds tensors up to here
            failure = failure_of(error)
        if failure:
            self._read()
            self._blame(failure)
            return
        for sequence in rows:
            sequence.launched += 1
        self._read()
        self._under_way = launched, rows
        if not self._batch.reads_late:
            self._read()

    def _mask(self, rows: list[Sequence]) -> bool:
        """Bring what the guides of `rows` allow; False: one of them has gone."""
        self._read()  # what may be next depends on it
        if not self.admission.rows_changed:
            allowed = [self.reports.allowed(sequence) for sequence in rows]
            self._batch.allow({row: bits for row, bits in enumerate(allowed) if bits})
        return not self.admission.rows_changed

    def _read(self) -> None:
        """Wait for the round under way, if there is one, and report what it chose."""
        if self._under_way is None:
            return
        (launched, rows), self._under_way = self._under_way, None
        try:
            records = records_of([launched])
        except Exception as error:  # of the device: nothing that runs can be saved
            self._blame(EngineError(str(failure_of(error))))
            return
        for sequence in rows:
            sequence.launched -= 1
        self.reports.add(records, rows, self.tally.count(launched, records, rows))

    def _blame(self, failure: EngineError) -> None:
        """A round failed. For want of memory the youngest goes, else all that were in it."""
        blamed = [sequence for sequence in self.admission.running if not sequence.gone]
        if isinstance(failure, OutOfMemory):
            blamed = sorted(blamed, key=lambda sequence: sequence.number)[-1:]
        for sequence in blamed:
            self.reports.end(sequence, failure)
        _free_memory(failure)

    def _settle(self) -> bool:
        """With nothing under way: let sequences go and come, give pages, set the rows anew.

        Returns whether one came.
        """
        self._read()
        admission = self.admission
        admission.let_go()
        before = len(admission.running)
        if admission.can_enter:
            if not admission.entering:
                admission.enter(self.decoder.prefill_chunk)
            self._read_prompts(admission.entering)
            admission.let_go()
        begun = len(admission.running) > before
        admission.give_pages(self._batch.num_tokens)
        rows = admission.running
        self._variant = variant_of_all(rows)
        where = [s.fields() for s in rows], [s.pages for s in rows]
        self._batch.load(*where, [s.penalised() for s in rows], [s.tokens for s in rows])
        return begun

    # ---- prompts ----

    def _read_prompts(self, sequences: list[Sequence]) -> None:
        """Read on in prompts, with one forward if it does not fail."""
        failure = None
        try:
            self._read_chunk(sequences)
        except Exception as error:  # which holds tensors up to here
            failure = failure_of(error)
        if not failure:
            return
        _free_memory(failure)
        if len(sequences) == 1:
            self.reports.end(sequences[0], failure)
        else:  # whose it was shows when each is read alone
            for sequence in sequences:
                self._read_prompts([sequence])

    def _read_chunk(self, sequences: list[Sequence]) -> None:
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
        penalised = [s.penalised(self.reports.allowed(s)) for s in sequences]
        fields = [s.fields() for s in sequences]
        records = self._batch.first(logits, fired, fields, variant, penalised)
        self.admission.begin(sequences)
        for sequence, end in zip(sequences, ends, strict=True):
            sequence.cached = end
            if end == sequence.num_prompt:
                self.prompt_tokens += end
        self.reports.add(records, sequences)

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
            self.admission.begin([sequence])


def _free_memory(failure: EngineError) -> None:
    if isinstance(failure, OutOfMemory):
        gc.collect()
        torch.cuda.empty_cache()
