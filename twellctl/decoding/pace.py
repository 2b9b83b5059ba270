"""How many drafts the next round has, and whose: what gives the most tokens a second, by what was
seen.

A round of k drafts takes so long (measured, by the number of rows), and gives so many tokens (by
how many of the drafts of late were kept, sequence by sequence). Rounds without drafts are one of
the choices. No token depends on the choice.
"""

from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import TypeAlias

from twellctl.decoding.rounds import Drafts

_COUNTS = (1, 2, 3, 5, 7)  # of drafts; each is a CUDA graph of its own
_FIRST = 3  # that are tried, where none was
_TRIALS = 3  # rounds of a kind before it is believed what they take
_GAIN = 1.03  # that drafts must promise
_AGAIN = 64  # rounds; one of so many is of the other kind, with drafts or without
_MEMORY = 16  # drafts of a sequence that count
_OF_ALL = 256  # and of all sequences
_PRIOR = 4  # drafts that a sequence begins with, of those seen of others
_FRESH = 0.25  # weight of the newest time


@dataclass
class Agreement:
    """Of late: drafts that were kept, and rounds in which one was not."""

    kept: float = 0.0
    refused: float = 0.0

    def see(self, offered: int, kept: int, memory: int = _MEMORY) -> None:
        """A round in which `kept` of `offered` drafts were kept."""
        self.kept += kept
        self.refused += kept < offered
        total = self.kept + self.refused
        if total > memory:
            self.kept, self.refused = self.kept * memory / total, self.refused * memory / total

    def share(self, prior: float) -> float:
        """Of drafts that are kept, given that the one before was; `prior`: before any was seen."""
        return (self.kept + _PRIOR * prior) / (self.kept + self.refused + _PRIOR)


Agreements: TypeAlias = Mapping[int, Agreement]  # of a sequence, by drafters


class Pace:
    """Chooses for one engine. `fixed`: the same for each round; None: what pays.

    The first drafter is asked now and then though it does not pay: what would be kept of its drafts
    only shows in rounds that have them.
    """

    def __init__(self, fixed: Drafts | None = None):
        self._fixed = fixed
        self._all: dict[int, Agreement] = defaultdict(lambda: Agreement(kept=3, refused=1))
        # by the number of rows
        self._seconds: dict[int, dict[Drafts, float]] = defaultdict(dict)
        self._counted: dict[tuple[int, Drafts], int] = defaultdict(int)
        self._rounds = 0

    def choose(self, rows: Rows[Agreements], most: Rows[int]) -> Drafts:
        """For a round of `rows`, of up to `most` drafts of each drafter."""
        if self._fixed is not None:
            num, drafter = self._fixed
            return Drafts(min(num, most[drafter]) if most else 0, drafter)
        if not any(most):
            return Drafts()
        self._rounds += 1
        size = _size(len(rows))
        trials = [Drafts(min(_FIRST, room), i) for i, room in enumerate(most) if room]
        for trial in (Drafts(), *trials):
            if self._counted[size, trial] < _TRIALS:
                return trial
        rates: dict[Drafts, float] = {}
        for drafter, room in enumerate(most):
            tokens = self._tokens(rows, drafter, room)
            of_drafter = (Drafts(k, drafter) for k in _COUNTS if k <= room)
            rates |= {each: tokens[each.num] / self._time(size, each) for each in of_drafter}
        choices = list(rates)
        plain = len(rows) / self._time(size, Drafts())
        best = max(choices, key=rates.__getitem__)
        if rates[best] > _GAIN * plain:
            return best if self._rounds % _AGAIN else Drafts()
        first = [choice for choice in choices if choice.drafter == choices[0].drafter]
        return Drafts() if self._rounds % _AGAIN else max(first, key=rates.__getitem__)

    def see(self, num_rows: int, drafts: Drafts, seconds: float) -> None:
        """A round of `num_rows` rows with such drafts took so long."""
        size, drafts = _size(num_rows), drafts if drafts.num else Drafts()
        known = self._seconds[size]
        before = known.get(drafts)
        known[drafts] = seconds if before is None else before + _FRESH * (seconds - before)
        self._counted[size, drafts] += 1

    def agreed(self, row: dict[int, Agreement], drafter: int, offered: int, kept: int) -> None:
        """What became of the drafts of a row."""
        row[drafter].see(offered, kept)
        self._all[drafter].see(offered, kept, _OF_ALL)

    def _tokens(self, rows: Rows[Agreements], drafter: int, most: int) -> list[float]:
        """That a round of all rows gives with 0, 1 .. `most` drafts."""
        prior = self._all[drafter].share(0.75)
        tokens = [float(len(rows))] * (most + 1)
        for row in rows:
            share = row[drafter].share(prior)
            all_kept, more = 1.0, 0.0
            for num in range(1, most + 1):
                all_kept *= share
                more += all_kept
                tokens[num] += more
        return tokens

    def _time(self, size: int, drafts: Drafts) -> float:
        """Above 0: as measured, or on a line through the two measured counts beside it."""
        return max(self._measured(size, drafts), 1e-9)

    def _measured(self, size: int, drafts: Drafts) -> float:
        of_size, (num, drafter) = self._seconds[size], drafts
        if drafts in of_size:
            return of_size[drafts]
        of_drafter = [of for of in of_size if of.drafter == drafter or not of.num]
        known = {of.num: of_size[of] for of in of_drafter}
        below = [other for other in sorted(known) if other < num]
        above = [other for other in sorted(known) if other > num]
        one, other = (below[-1], above[0]) if above else below[-2:]
        slope = (known[other] - known[one]) / (other - one)
        return known[one] + slope * (num - one)


def _size(num_rows: int) -> int:
    """Rows up to the same power of two take the same time."""
    return (num_rows - 1).bit_length()
