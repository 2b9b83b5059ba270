"""How many drafts the next round has, and whose: what gives the most tokens a second, by what was
seen.

A round of k drafts takes so long (measured, by the number of rows), and gives one token and those
drafts that are kept. How often a draft is kept, after drafts that were kept, is counted by its
depth in the round, over the rounds of all sequences of late; a depth that none reached has the
chance of the one before it. What is refused of a sequence is, at every depth, so many times more or
less than that as it was in its own rounds of late. Rounds without drafts are one of the choices. No
token depends on the choice.
"""

from bisect import bisect
from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import TypeAlias

from twellctl.decoding.rounds import Drafts

_COUNTS = (1, 2, 3, 5, 7, 11, 15)  # of drafts; each is a CUDA graph of its own
_FIRST = 3  # that are tried, where none was
_TRIALS = 3  # rounds of a kind before it is believed what they take
_GAIN = 1.03  # that drafts must promise
_AGAIN = 64  # rounds; one of so many is of the other kind, with drafts or without
_CHANCE = 0.75  # of a draft, before any was seen
_MEMORY = 16  # rounds of a sequence, in which what was seen fades to 1/e
_OF_ALL = 128  # and of all sequences
_PRIOR = 3  # drafts that a depth begins with, as of the one before, and a sequence, as of all
_FRESH = 0.25  # weight of the newest time
_LEAST = 1e-9  # seconds of a round


@dataclass
class Agreement:
    """By depth in the round, of late: drafts that came after ones that were kept, and those of them
    that were kept, too."""

    reached: list[float] = field(default_factory=lambda: [0.0] * _COUNTS[-1])
    kept: list[float] = field(default_factory=lambda: [0.0] * _COUNTS[-1])

    def see(self, offered: int, kept: int, memory: int = _MEMORY) -> None:
        """A round in which `kept` of `offered` drafts were kept."""
        reached, stays = min(offered, kept + 1), 1 - 1 / memory
        self.reached = [stays * each + (i < reached) for i, each in enumerate(self.reached)]
        self.kept = [stays * each + (i < kept) for i, each in enumerate(self.kept)]

    def chances(self) -> list[float]:
        """Of a draft after ones that were kept, by depth; below 1."""
        found, before = [], _CHANCE
        for reached, kept in zip(self.reached, self.kept, strict=True):
            before = (kept + _PRIOR * before) / (reached + _PRIOR)
            found.append(before)
        return found

    def times_refused(self, chances: Rows[float]) -> float:
        """How many times as many were refused as if they had these `chances`, by depth."""
        refused, prior = sum(self.reached) - sum(self.kept), _PRIOR * (1 - chances[0])
        expected = sum(self.reached) - sum(map(mul, self.reached, chances))
        return (refused + prior) / (expected + prior)


Agreements: TypeAlias = Mapping[int, Agreement]  # of a sequence, by drafters


class Pace:
    """Chooses for one engine. `fixed`: the same for each round; None: what pays.

    The first drafter is asked now and then though it does not pay: what would be kept of its drafts
    only shows in rounds that have them.
    """

    def __init__(self, fixed: Drafts | None = None):
        self._fixed = fixed
        self._all: dict[int, Agreement] = defaultdict(Agreement)  # by drafters
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
            counts = [k for k in _COUNTS if k <= room]
            if not counts:
                continue
            tokens, known = self._tokens(rows, drafter), self._known(size, drafter)
            rates |= {Drafts(k, drafter): tokens[k] / _time(known, k) for k in counts}
        choices = list(rates)
        plain = len(rows) / self._seconds[size][Drafts()]
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
        seconds = max(seconds, _LEAST)
        known[drafts] = seconds if before is None else before + _FRESH * (seconds - before)
        self._counted[size, drafts] += 1

    def agreed(self, row: dict[int, Agreement], drafter: int, offered: int, kept: int) -> None:
        """What became of the drafts of a row."""
        if offered:
            row[drafter].see(offered, kept)
            self._all[drafter].see(offered, kept, _OF_ALL)

    def _tokens(self, rows: Rows[Agreements], drafter: int) -> list[float]:
        """That a round of all rows gives with 0, 1 .. drafts."""
        chances, more = self._all[drafter].chances(), [0.0] * _COUNTS[-1]
        for row in rows:
            times, all_kept = row[drafter].times_refused(chances), 1.0
            for depth, chance in enumerate(chances):
                all_kept *= max(0.0, 1 - times * (1 - chance))
                more[depth] += all_kept
        return list(accumulate(more, initial=float(len(rows))))

    def _known(self, size: int, drafter: int) -> dict[int, float]:
        """Seconds that rounds took, by the number of drafts."""
        of_size = self._seconds[size].items()
        return {of.num: took for of, took in of_size if of.drafter == drafter or not of.num}


def _time(known: Mapping[int, float], num: int) -> float:
    """As measured, or on a line through the two measured counts beside it; above 0."""
    if num not in known:
        counts = sorted(known)
        place = min(bisect(counts, num), len(counts) - 1)
        one, other = counts[place - 1], counts[place]
        slope = (known[other] - known[one]) / (other - one)
        return max(known[one] + slope * (num - one), _LEAST)
    return known[num]


def _size(num_rows: int) -> int:
    """Rows up to the same power of two take the same time."""
    return (num_rows - 1).bit_length()
