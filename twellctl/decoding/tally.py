"""What became of the drafts of an engine, and which ones its next round has."""

from collections.abc import Sequence as Rows

import numpy as np

from twellctl.decoding.drafted import Draft, Drafted
from twellctl.decoding.lookup import LookupDrafter, Repeats
from twellctl.decoding.pace import Pace
from twellctl.decoding.rounds import NOT_KEPT, Drafter, Drafts, Round
from twellctl.decoding.sequence import Sequence


class Tally:
    """Of rounds that `drafters` draft for. `fixed`: their drafts, if there is room; None: as many
    as pay (pace.py)."""

    def __init__(self, drafters: Rows[Drafter], fixed: Drafts | None):
        self.names = tuple(drafter.name for drafter in drafters)
        self.drafted = Drafted()
        looking = (i for i, each in enumerate(drafters) if isinstance(each, LookupDrafter))
        self._lookup = next(looking, None)
        self._pace = Pace(fixed, self._lookup)

    def choose(
        self, rows: Rows[Sequence], most: Rows[int], under_way: Round | None = None
    ) -> Drafts:
        """For a round of `rows`, up to `most` of each drafter; none: no drafts. `under_way`: the
        round before it, if it was not read yet."""
        drafts = None if under_way is None else under_way.drafts
        return self._pace.choose([sequence.standing for sequence in rows], most, drafts)

    def count(
        self, launched: Round, records: np.ndarray, rows: Rows[Sequence]
    ) -> list[list[Draft] | None]:
        """Note how long a round took and what became of its drafts, before its `rows` get what is
        in its `records`. Returns what to say so of the tokens of each row; None: nothing."""
        drafts = launched.drafts
        if self.names:
            self._pace.see(len(rows), drafts, launched.seconds)
        kept = (records[..., 0] != NOT_KEPT).sum(1) - 1
        counted = zip(rows, kept.tolist(), strict=True)
        return [self._counted(drafts, sequence, count) for sequence, count in counted]

    def _counted(self, drafts: Drafts, sequence: Sequence, kept: int) -> list[Draft] | None:
        if sequence.gone:
            return None
        read = sequence.num_drafts(drafts.num)
        if drafts.drafter != self._lookup:
            self._pace.agreed(sequence.standing, drafts.drafter, read, kept)
        self.drafted.passes += 1
        if not read:
            return None
        name = self.names[drafts.drafter]
        self.drafted.add(name, read, kept)
        return [Draft(name, 0 if i else read, i < kept) for i in range(kept + 1)]

    def look_up(self, sequence: Sequence, before: int) -> None:
        """Note which of the tokens from `before` on its text would have told, whoever drafted."""
        if self._lookup is None:
            return
        if sequence.repeats is None:
            sequence.repeats = Repeats(sequence.tokens[:before])
        for token in sequence.tokens[before:]:
            self._pace.told(sequence.standing, sequence.repeats.add(token))
