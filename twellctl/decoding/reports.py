"""What became of sequences: their tokens, failures and ends, until somebody takes these."""

from collections.abc import Sequence as Some
from itertools import repeat
from typing import TypeAlias

import numpy as np

from twellctl.decoding.drafted import Draft
from twellctl.decoding.engine import EngineError, GuideError, OutOfMemory, Token
from twellctl.decoding.failures import NO_NUMBERS, failure_of_guide
from twellctl.decoding.rounds import NOT_KEPT, chosen_in
from twellctl.decoding.sequence import Sequence
from twellctl.decoding.step_end import Record
from twellctl.decoding.tally import Tally

# a token, the sequence's failure, or None for its end
Event: TypeAlias = tuple[Sequence, Token | EngineError | None]


class Reports:
    """Of sequences that one of `eos_tokens` ends; rounds leave a `record` of each token.

    `fired`: sums of the shares of neurons that fired, by layer, over all `generated_tokens`.
    `failed`: generations in a row, not for want of memory, nor by their guides.
    """

    def __init__(self, record: Record, eos_tokens: frozenset[int], tally: Tally):
        self.generated_tokens = self.failed = 0
        self.fired = np.zeros(len(record.neurons))
        self._record, self._eos_tokens, self._tally = record, eos_tokens, tally
        self._events: list[Event] = []

    def take(self) -> list[Event]:
        """All since the last time."""
        events, self._events = self._events, []
        return events

    def add(
        self,
        records: np.ndarray,
        sequences: Some[Sequence],
        drafted: Some[list[Draft] | None] | None = None,
    ) -> None:
        """Give the tokens of `records` `[rows, tokens, width]` to those `sequences` that go on.

        `drafted`: what is said of the tokens of each row (`Tally.count`).
        """
        taken = []
        drafted = drafted or [None] * len(sequences)
        rows = zip(sequences, chosen_in(records), records, drafted, strict=True)
        for sequence, chosen, of_row, drafts in rows:
            if sequence.gone:
                continue
            before = len(sequence.tokens)
            new, is_broken = sequence.take(chosen, self._eos_tokens)
            self._tally.look_up(sequence, before)
            used = of_row if len(of_row) == 1 else of_row[of_row[:, 0] != NOT_KEPT]
            taken.append(used[: len(new)])
            self._add_tokens(sequence, taken[-1], drafts)
            if is_broken:
                self.end(sequence, EngineError(NO_NUMBERS))
            elif sequence.has_ended(self._eos_tokens):
                self.end(sequence)
        if taken:
            self.fired += self._record.shares(np.concatenate(taken)).sum(0)

    def end(self, sequence: Sequence, error: EngineError | None = None) -> None:
        """It goes on no longer; because of `error`, if there is one."""
        if not sequence.gone:
            sequence.gone = True
            self.failed += error is not None and not isinstance(error, OutOfMemory | GuideError)
            self._events.append((sequence, error))

    def _add_tokens(
        self, sequence: Sequence, records: np.ndarray, drafts: list[Draft] | None
    ) -> None:
        """The sequence's new tokens, `records` `[tokens, width]`, until one is wrong."""
        for record, draft in zip(records, drafts or repeat(None), strict=False):
            token = self._record.token(record, sequence.sampling, draft)
            if token is None:
                self.end(sequence, EngineError(NO_NUMBERS))
                return
            self.generated_tokens += 1
            self.failed = 0
            self._events.append((sequence, token))
            is_end = sequence.ends_with(token.id, self._eos_tokens)
            if not is_end and not self._follows(sequence, token.id):
                return

    # ---- guides: one that fails, if by a panic, ends its own sequence and no other ----

    def allowed(self, sequence: Sequence) -> bytes | None:
        """What may be next, as `Guide.compute_bitmask` says it; None: anything, or it failed."""
        try:
            return sequence.guide.compute_bitmask() if sequence.guide else None
        except BaseException as error:
            self.end(sequence, failure_of_guide(error))
            return None

    def _follows(self, sequence: Sequence, token: int) -> bool:
        """Whether its guide takes `token`, which was chosen; if not, the sequence ends."""
        failure: EngineError = GuideError(f"token {token} is not allowed here")
        try:
            if sequence.guide is None or sequence.guide.consume_token(token):
                return True
        except BaseException as error:
            failure = failure_of_guide(error)
        self.end(sequence, failure)
        return False
