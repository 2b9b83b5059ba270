"""How many drafts the next round has, and whose: what gives the most tokens a second, by what was
seen.

A round of k drafts takes so long (measured, by the number of rows), and gives one token and those
drafts that are kept (chances.py). Rounds without drafts are one of the choices. No token depends on
the choice.
"""

from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from itertools import pairwise

from twellctl.decoding.chances import LookupChances, ModelChances, Standing
from twellctl.decoding.rounds import Drafts

_COUNTS = (1, 2, 3, 5, 7, 11, 15)  # of drafts; each is a CUDA graph of its own
_FIRST = 3  # that are tried, where none was
_TRIALS = 3  # rounds of a kind before it is believed what they take; the first does not count
_GAIN = 1.03  # that drafts must promise
_AGAIN = 64  # rounds; where drafts do not pay, one of so many has some
_PLAIN_AGAIN = 256  # and where they pay, one of so many has none: contexts grow, and end
_FRESH = 0.25  # weight of the newest time
_LEAST = 1e-9  # seconds of a round
_PLAIN = -1  # no drafter


class Pace:
    """Chooses for one engine. `fixed`: the same for each round; None: what pays. `lookup`: the
    drafter, if there is one, of which it is known what would be kept whoever is asked.

    A model is asked for drafts now and then though it does not pay: what would be kept of them only
    shows in rounds that have them.
    """

    def __init__(self, fixed: Drafts | None = None, lookup: int | None = None):
        self._fixed, self._lookup = fixed, lookup
        # by drafters
        self._models: dict[int, ModelChances] = defaultdict(lambda: ModelChances(_COUNTS[-1]))
        self._looked_up = LookupChances()
        # by the number of rows, and the drafter; by the number of drafts
        self._seconds: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        self._counted: dict[tuple[int, Drafts], int] = defaultdict(int)
        self._rounds = 0

    def choose(
        self, rows: Rows[Standing], most: Rows[int], under_way: Drafts | None = None
    ) -> Drafts:
        """For a round of `rows`, of up to `most` drafts of each drafter. `under_way`: those of the
        round before it, of the same rows, if that was not read yet."""
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
        found, asked = (0.0, 0, 0), (0.0, 0, 0)  # tokens a second, and who gives them
        for drafter, room in enumerate(most):
            if room:
                tokens = self._tokens(rows, drafter, room, under_way)
                times = _times(self._seconds[size, _PLAIN] | self._seconds[size, drafter], room)
                counts = [k for k in _COUNTS if k <= room]
                best = max([(tokens[k] / times[k], k, drafter) for k in counts])
                found = max(found, best)
                if drafter != self._lookup:
                    asked = max(asked, best)
        if found[0] > _GAIN * len(rows) / self._seconds[size, _PLAIN][0]:
            return Drafts(*found[1:]) if self._rounds % _PLAIN_AGAIN else Drafts()
        return Drafts() if self._rounds % _AGAIN else Drafts(*asked[1:])

    def see(self, num_rows: int, drafts: Drafts, seconds: float) -> None:
        """A round of `num_rows` rows with such drafts took so long."""
        size, drafts = _size(num_rows), drafts if drafts.num else Drafts()
        self._counted[size, drafts] += 1
        if self._counted[size, drafts] == 1:  # it brought a new graph to the device
            return
        known = self._seconds[size, drafts.drafter if drafts.num else _PLAIN]
        before = known.get(drafts.num, seconds)
        known[drafts.num] = max(before + _FRESH * (seconds - before), _LEAST)

    def agreed(self, row: Standing, drafter: int, offered: int, kept: int) -> None:
        """What became of the drafts of a row, which a model made."""
        if offered:
            self._models[drafter].see(row.agreements[drafter], offered, kept)

    def told(self, row: Standing, was_told: bool) -> None:
        """Whether the next token of a row's text could be looked up."""
        self._looked_up.see(row.repetition, was_told)

    def _tokens(
        self, rows: Rows[Standing], drafter: int, most: int, under_way: Drafts | None
    ) -> list[float]:
        """That a round of all rows gives with 0, 1 .. `most` drafts."""
        if drafter == self._lookup:
            kept = [
                self._looked_up.kept(row.repetition, most, self._ahead(row, under_way))
                for row in rows
            ]
        else:
            model = self._models[drafter]
            kept = [model.kept(row.agreements[drafter], most) for row in rows]
        return [len(rows) + of_all for of_all in map(sum, zip(*kept, strict=True))]

    def _ahead(self, row: Standing, under_way: Drafts | None) -> int:
        """Tokens that a round under way gives a row: looked up, if all are kept."""
        if under_way is None:
            return 0
        num, drafter = under_way
        if num and drafter != self._lookup:
            num = round(self._models[drafter].kept(row.agreements[drafter], num)[-1])
        return 1 + num


def _times(known: Mapping[int, float], most: int) -> list[float]:
    """Seconds with 0, 1 .. `most` drafts: of those that were not measured, on a line through the
    two measured counts beside them; above 0."""
    found: list[float] = []
    counts, slope = sorted(known), 0.0
    for one, other in pairwise(counts):
        slope = (known[other] - known[one]) / (other - one)
        found += [known[one] + slope * i for i in range(other - one)]
    last = counts[-1]
    further = range(max(0, most - last) + 1)
    return found + [max(known[last] + slope * i, _LEAST) for i in further]


def _size(num_rows: int) -> int:
    """Rows up to the same power of two take the same time."""
    return (num_rows - 1).bit_length()
