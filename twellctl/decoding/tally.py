"""What became of the drafts of an engine, and which ones its next round has."""

from collections.abc import Sequence as Rows

import numpy as np

from twellctl.decoding.lookup import LookupDrafter, Repeats
from twellctl.decoding.pace import Pace
from twellctl.decoding.rounds import NOT_KEPT, Drafter, Drafts, Round
from twellctl.decoding.sequence import Sequence


class Tally:
    """Of rounds that `drafters` draft for. `fixed`: their drafts, if there is room; None: as many
    as pay (pace.py).

    `passes` of the model over a sequence in rounds; drafts that these read, and that they `kept`.
    """

    def __init__(self, drafters: Rows[Drafter], fixed: Drafts | None):
        self.has_drafters = bool(drafters)
        self.passes = self.drafted = self.kept = 0
        self._pace = Pace(fixed)
        looking = (i for i, each in enumerate(drafters) if isinstance(each, LookupDrafter))
        self._lookup = next(looking, None)

    def choose(self, rows: Rows[Sequence], most: Rows[int]) -> Drafts:
        """For a round of `rows`, up to `most` of each drafter; none: no drafts."""
        return self._pace.choose([sequence.agreements for sequence in rows], most)

    def count(self, launched: Round, records: np.ndarray, rows: Rows[Sequence]) -> None:
        """Note how long a round took and what became of its drafts, before its `rows` get what is
        in its `records`."""
        drafts = launched.drafts
        if self.has_drafters:
            self._pace.see(len(rows), drafts, launched.seconds)
        kept = (records[..., 0] != NOT_KEPT).sum(1) - 1
        for sequence, count in zip(rows, kept.tolist(), strict=True):
            if sequence.gone:
                continue
            offered = sequence.num_drafts(drafts.num)
            if drafts.drafter != self._lookup:
                self._pace.agreed(sequence.agreements, drafts.drafter, offered, count)
            self.passes += 1
            self.drafted += offered
            self.kept += count

    def look_up(self, sequence: Sequence, before: int) -> None:
        """Note which of the tokens from `before` on its text would have told, whoever drafted."""
        if self._lookup is None:
            return
        if sequence.repeats is None:
            sequence.repeats = Repeats(sequence.tokens[:before])
        for token in sequence.tokens[before:]:
            told = sequence.repeats.add(token)
            self._pace.agreed(sequence.agreements, self._lookup, 1, int(told))
