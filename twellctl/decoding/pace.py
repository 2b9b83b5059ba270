"""How many drafts the next round has: as many as give the most tokens a second, by what was seen.

A round of k drafts takes so long (measured, by the number of rows), and gives so many tokens (by
how many of the drafts of late were kept, sequence by sequence). Rounds without drafts are one of
the choices. No token depends on the choice.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

_COUNTS = (1, 2, 3, 5, 7)  # of drafts; each is a CUDA graph of its own
_FIRST = 3  # that are tried, where none was
_TRIALS = 3  # rounds of a kind before it is believed what they take
_GAIN = 1.03  # that drafts must promise
_AGAIN = 64  # rounds; one of so many is of the other kind, with drafts or without
_MEMORY = 16  # drafts of a sequence that count
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


class Pace:
    """Chooses for one engine. `fixed`: always so many drafts; None: what pays."""

    def __init__(self, fixed: int | None = None):
        self._fixed = fixed
        self._all = Agreement(kept=3, refused=1)
        self._seconds: dict[int, dict[int, float]] = {}  # by rows, and by drafts
        self._counted: dict[tuple[int, int], int] = {}
        self._rounds = 0

    def choose(self, rows: Rows[Agreement], most: int) -> int:
        """Drafts for a round of `rows`, 0 to `most`."""
        if self._fixed is not None or not most:
            return min(self._fixed or 0, most)
        self._rounds += 1
        counts = [count for count in _COUNTS if count <= most]
        size = _size(len(rows))
        for trial in (0, min(_FIRST, most)):
            if self._counted.get((size, trial), 0) < _TRIALS:
                return trial
        shares = [row.share(self._share) for row in rows]
        rates = {count: self._rate(shares, size, count) for count in (0, *counts)}
        drafted = max(counts, key=rates.__getitem__)
        pays = rates[drafted] > _GAIN * rates[0]
        return drafted if pays != (self._rounds % _AGAIN == 0) else 0

    def see(self, num_rows: int, drafts: int, seconds: float) -> None:
        """A round of `num_rows` rows with so many drafts took so long."""
        size = _size(num_rows)
        known = self._seconds.setdefault(size, {})
        before = known.get(drafts)
        known[drafts] = seconds if before is None else before + _FRESH * (seconds - before)
        self._counted[size, drafts] = self._counted.get((size, drafts), 0) + 1

    def agreed(self, row: Agreement, offered: int, kept: int) -> None:
        """What became of the drafts of a row."""
        row.see(offered, kept)
        self._all.see(offered, kept, 16 * _MEMORY)

    @property
    def _share(self) -> float:
        return self._all.share(0.75)

    def _rate(self, shares: Rows[float], size: int, count: int) -> float:
        """Tokens a second, of all rows."""
        tokens = sum(sum(share**i for i in range(count + 1)) for share in shares)
        return tokens / max(self._time(size, count), 1e-9)

    def _time(self, size: int, count: int) -> float:
        """As measured, or on a line through the two measured counts beside it."""
        known = self._seconds[size]
        if count in known:
            return known[count]
        below = [other for other in sorted(known) if other < count]
        above = [other for other in sorted(known) if other > count]
        one, other = (below[-1], above[0]) if above else below[-2:]
        slope = (known[other] - known[one]) / (other - one)
        return known[one] + slope * (count - one)


def _size(num_rows: int) -> int:
    """Rows up to the same power of two take the same time."""
    return (num_rows - 1).bit_length()
