"""Many prompts continued as fast as they go through: no one waits for a token, only for the last.

Rows of a batch take rounds, `ROUNDS` in a row without the host. The host looks at what they gave
when the next ones run already: it takes out what has ended, reads the next prompts together, and
puts them into the free rows. The last token of a prompt is a row's first input, so that reading
gives only keys and values. (scheduler.py is for those who wait for each token.)
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Rows
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedModel

from twellctl.bundle.twell_spec import PAGE
from twellctl.decoding.batch import Batch
from twellctl.decoding.decoder import Decoder
from twellctl.decoding.engine import EngineError, OutOfMemory, Sampling
from twellctl.decoding.failures import NO_NUMBERS, failure_of
from twellctl.decoding.opening import eos_tokens, num_pages
from twellctl.decoding.paged_cache import PagedCache
from twellctl.decoding.pages import PagePool, pages_for
from twellctl.decoding.rounds import Drafter, Drafts, Round, chosen_in, records_of
from twellctl.decoding.sampler import Field, Variant
from twellctl.decoding.sequence import Sequence, check_fits, variant_of_all
from twellctl.decoding.torch_decoder import TorchDecoder, padded, why_not_consecutive
from twellctl.errors import TwellError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS = 1024  # at once, at most
ROUNDS = 8  # between two looks of the host
_PROMPT_TOKENS = 16384  # read in one forward, at most
_SHRINK = 4  # to a quarter of the rows, and no sooner: a round of other size is captured anew


def answers(
    model: PreTrainedModel,
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Iterable[list[int]],
    *,
    max_new_tokens: int | Iterable[int] = 512,
    rows: int = ROWS,
) -> Iterator[tuple[int, list[int]]]:
    """(index of a prompt, the tokens after it) as they end, the token that ended them included.

    Greedily. `max_new_tokens` may be given for each prompt. Raises `TwellError` for a model whose
    steps cannot be batched, a prompt that is empty or too long, and out of memory.
    """
    prompts = [list(prompt) for prompt in prompts]
    most = repeat(max_new_tokens) if isinstance(max_new_tokens, int) else max_new_tokens
    sequences = [
        Sequence(prompt, Sampling(tokens, temperature=0), i)
        for i, (prompt, tokens) in enumerate(zip(prompts, most, strict=False))
    ]
    waiting, longest = iter(sequences), max((s.most_tokens for s in sequences), default=0)
    ends = eos_tokens(model, [tokenizer.eos_token_id])
    rows = max(1, min(rows, len(prompts)))
    with contextlib.closing(open_bulk(model, ends, rows=rows, longest=longest)) as bulk:
        for sequence in bulk.run(lambda: next(waiting, None)):
            yield sequence.client, sequence.tokens[sequence.num_prompt :]


def open_bulk(
    model: PreTrainedModel,
    ends: frozenset[int],
    *,
    rows: int = ROWS,
    longest: int | None = None,
) -> "Bulk":
    """A `Bulk` over the best decoder for `model`, which continues sequences of up to `longest`
    tokens; None: the model's context. `TwellError` for a model that does not go through batches.
    """
    why = why_not_consecutive(model)
    if why is not None and (reason := TorchDecoder.why_not(model)):
        raise TwellError(f"this model cannot write several texts at once: {reason}")
    decoder = TorchDecoder(model, consecutive=why is None)
    longest = min(longest or decoder.context, decoder.context)
    pages = num_pages(decoder, None, rows, longest)
    with torch.inference_mode():
        by_tokens = decoder.consecutive
        decoder.attach(PagedCache(decoder.shapes, pages, decoder.device, by_tokens=by_tokens))
    return Bulk(decoder, pages, ends, rows=rows, longest=longest, why_slow=why)


class Bulk:
    """Continues sequences until one of `ends`, up to `rows` at once, each in consecutive pages."""

    def __init__(
        self,
        decoder: Decoder,
        num_pages: int,
        ends: frozenset[int],
        *,
        rows: int,
        longest: int,
        why_slow: str | None = None,
        drafters: Rows[Drafter] = (),
    ):
        """`decoder` uses a cache of `num_pages` pages. `longest`: tokens of a sequence, at most.
        `why_slow`: what stands against a faster decoder."""
        self._decoder, self.why_slow, self.ends = decoder, why_slow, ends
        self.num_drawn = self.num_tokens = 0  # in all; of what is under way, with the prompts
        self._pool, self._max_rows = PagePool(num_pages), rows
        self.context = min(longest, self._pool.capacity * PAGE)
        self._rows: list[Sequence | None] = []  # None: free
        self._left: set[int] = set()  # rows whose sequence has gone, and still writes
        self._held: Sequence | None = None  # what there was no room for
        self._under_way: tuple[list[Round], list[tuple[int, Sequence]]] | None = None
        self._variant = Variant()
        self._batch = Batch(decoder, rows, pages_for(self.context), 2 * ROUNDS, drafters)

    def close(self) -> None:
        """Wait until nothing runs any more that writes to the cache."""
        if self._decoder.device.type == "cuda":
            torch.cuda.synchronize(self._decoder.device)

    def run(self, following: Callable[[], Sequence | None]) -> Iterator[Sequence]:
        """Sequences as they end; `following` gives the next one when there is room, None: none now.

        It is asked again after each that ended. Raises `TwellError`.
        """
        busy = True
        while busy:
            try:
                busy, ended = self._advance(following)
            except TwellError:
                raise
            except Exception as error:  # of the device
                failure = failure_of(error)
                reason = str(failure)
                if isinstance(failure, OutOfMemory):
                    reason = "out of memory: lower --batch-size or --max-tokens"
                raise TwellError(reason) from error
            yield from ended

    @torch.inference_mode()
    def _advance(self, following: Callable[[], Sequence | None]) -> tuple[bool, list[Sequence]]:
        """Launch the next rounds and look at those before; (whether to go on, what has ended)."""
        with self._batch.on_stream:
            entered = self._enter(following)
            launched = self._launch()
            read, self._under_way = self._under_way, launched
            ended = [] if read is None else self._read(*read)
            if launched and not self._batch.reads_late:
                self._under_way = None
                ended += self._read(*launched)
        return bool(entered or launched or ended or self._under_way), ended

    # ---- rows ----

    def _enter(self, following: Callable[[], Sequence | None]) -> bool:
        """Fill the free rows. Those that stay free write where nobody reads."""
        places = [row for row, sequence in enumerate(self._rows) if sequence is None]
        places += range(len(self._rows), self._max_rows)
        entered: dict[int, Sequence] = {}
        for row in places:
            sequence, self._held = self._held or following(), None
            if sequence is None:
                break
            try:
                check_fits(sequence, self.context)
            except EngineError as error:
                raise TwellError(str(error)) from error
            pages = self._pool.take_run(pages_for(sequence.most_tokens))
            if pages is None:
                self._held = sequence
                break
            sequence.pages, entered[row] = pages, sequence
        self._read_prompts(list(entered.values()))
        self._put(entered)
        return bool(entered)

    def _read_prompts(self, sequences: list[Sequence]) -> None:
        """All but their last tokens, in few forwards."""
        some: list[Sequence] = []
        size = 0
        for sequence in [s for s in sequences if s.num_prompt > 1]:
            if some and size + sequence.num_prompt > _PROMPT_TOKENS:
                self._read_together(some)
                some, size = [], 0
            some.append(sequence)
            size += sequence.num_prompt
        if some:
            self._read_together(some)

    def _read_together(self, sequences: list[Sequence]) -> None:
        parts = [(s.tokens[:-1], 0, s.pages) for s in sequences]
        self._decoder.run(*padded(parts), last=0)

    def _put(self, entered: dict[int, Sequence]) -> None:
        nobody: np.ndarray = np.zeros(len(Field), np.int32)
        changed: dict[int, tuple[np.ndarray, list[int]]] = {row: (nobody, []) for row in self._left}
        changed |= {row: (s.fields(), s.pages) for row, s in entered.items()}
        self._left.clear()
        if changed:
            self._batch.put(list(changed), *zip(*changed.values(), strict=True))
        self._rows += [None] * (max(entered, default=-1) + 1 - len(self._rows))
        for row, sequence in entered.items():
            self._rows[row] = sequence
        self._variant |= variant_of_all(list(entered.values()))
        self.num_tokens += sum(sequence.num_prompt for sequence in entered.values())
        taken = [row for row, sequence in enumerate(self._rows) if sequence is not None]
        if taken and _SHRINK * len(taken) <= len(self._rows):
            self._batch.keep(taken)
            self._rows = [self._rows[row] for row in taken]

    # ---- rounds ----

    def _launch(self) -> tuple[list[Round], list[tuple[int, Sequence]]] | None:
        rows = [(row, s) for row, s in enumerate(self._rows) if s and not s.all_launched]
        if not rows:
            return None
        count = min(ROUNDS, max(s.most_tokens - len(s.tokens) - s.launched for _, s in rows))
        num_pages = max(len(s.pages) for _, s in rows)
        for _, sequence in rows:
            sequence.launched += count
        how = num_pages, self._variant, Drafts(next(iter(self._batch.most_drafts), 0))
        return [self._batch.launch(*how) for _ in range(count)], rows

    def _read(self, rounds: list[Round], rows: list[tuple[int, Sequence]]) -> list[Sequence]:
        """Wait for `rounds`; which of `rows` have ended."""
        chosen, ended = chosen_in(records_of(rounds)), []
        for row, sequence in rows:
            sequence.launched -= len(rounds)
            if sequence.gone:
                continue
            new, is_broken = sequence.take(chosen[row], self.ends)
            self.num_drawn += len(new)
            self.num_tokens += len(new)
            if is_broken:
                raise TwellError(NO_NUMBERS)
            if sequence.has_ended(self.ends):
                ended.append(sequence)
                self._leave(sequence)
        return ended

    def _leave(self, sequence: Sequence) -> None:
        sequence.gone = True
        self._pool.give_back(sequence.pages)
        row = self._rows.index(sequence)
        self._rows[row] = None
        self._left.add(row)
        self.num_tokens -= len(sequence.tokens)
