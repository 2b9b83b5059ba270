"""How many drafts of a round are kept, by what was seen: those of a model, and those looked up.

What an engine saw of all its sequences of late tells what a new one begins with. What a sequence
itself had kept tells how far it differs.
"""

from collections import defaultdict
from dataclasses import dataclass, field

_CHANCE = 0.75  # of a draft, before any was seen
_MEMORY = 16  # rounds of a sequence, in which what was seen fades to 1/e
_OF_ALL = 128  # and drafts of one depth, or tokens of one kind, of all sequences
_PRIOR = 3  # drafts that a depth begins with, as of the one before
_AS_ALL = 2  # refusals that a sequence begins with, as many as expected
_SHARES = 6  # kinds of text, by the share of it that repeats
_OF_TEXT = 16  # tokens, in which that share fades to 1/e
_GOES_ON = {False: 0.1, True: 0.7}  # a text's repetition, before any was seen
_SEEN = 2  # tokens that say so


@dataclass
class Agreement:
    """Of a sequence with a model that drafts, of late: drafts that were refused, and how many of
    them all sequences would have had refused."""

    refused: float = 0.0
    expected: float = 0.0

    @property
    def times_refused(self) -> float:
        return (self.refused + _AS_ALL) / (self.expected + _AS_ALL)


@dataclass
class Repetition:
    """Of a sequence's text of late: its tokens, those that a look at the text before them told, and
    whether the last one is of these."""

    tokens: float = 0.0
    told: float = 0.0
    goes_on: bool = False

    @property
    def share(self) -> int:
        """That is told, 0 to `_SHARES` - 1."""
        return int(_SHARES * self.told / (self.tokens + 1))

    def add(self, told: bool) -> None:
        stays = 1 - 1 / _OF_TEXT
        self.tokens = stays * self.tokens + 1
        self.told = stays * self.told + told
        self.goes_on = told


@dataclass
class Standing:
    """How a sequence stands with those who draft."""

    agreements: dict[int, Agreement] = field(default_factory=lambda: defaultdict(Agreement))
    repetition: Repetition = field(default_factory=Repetition)


class _Share:
    """Of what was seen of late, the share that was kept."""

    def __init__(self) -> None:
        self._seen = self._kept = 0.0

    def add(self, kept: bool) -> None:
        stays = 1 - 1 / _OF_ALL
        self._seen, self._kept = stays * self._seen + 1, stays * self._kept + kept

    def of(self, chance: float, seen: float) -> float:
        """As if `seen` more had come before, of which that share was kept."""
        return (self._kept + seen * chance) / (self._seen + seen)


class ModelChances:
    """Of a model's drafts. The chance of one, after ones that were kept, is counted by its depth in
    the round; a depth that none reached has that of the one before. What is refused of a sequence
    is, at every depth, so many times more or less than that as it was in its own rounds of late.
    Drafts beyond the first `most` of a round do not count.
    """

    def __init__(self, most: int):
        self._by_depth = [_Share() for _ in range(most)]
        self._chances = [_CHANCE] * most  # of all sequences; below 1

    def see(self, row: Agreement, offered: int, kept: int) -> None:
        """A round of a row in which `kept` of `offered` drafts were kept."""
        stays, reached = 1 - 1 / _MEMORY, min(offered, kept + 1, len(self._by_depth))
        expected = reached - sum(self._chances[:reached])
        row.refused = stays * row.refused + (kept < offered)
        row.expected = stays * row.expected + expected
        for depth in range(reached):
            self._by_depth[depth].add(depth < kept)
        chance = _CHANCE
        for depth, share in enumerate(self._by_depth):
            self._chances[depth] = chance = share.of(chance, _PRIOR)

    def kept(self, row: Agreement, most: int) -> list[float]:
        """How many are kept of 0, 1 .. `most` drafts."""
        times, all_kept, kept, found = row.times_refused, 1.0, 0.0, [0.0]
        for chance in self._chances[:most]:
            all_kept *= max(0.0, 1 - times * (1 - chance))
            kept += all_kept
            found.append(kept)
        return found


class LookupChances:
    """Of drafts that are looked up. The chance that a token is told is counted by the share of its
    text that was, and by whether the token before it was. Each token that is made counts, whoever
    drafted."""

    def __init__(self) -> None:
        self._by_kind: dict[tuple[int, bool], _Share] = defaultdict(_Share)

    def see(self, row: Repetition, told: bool) -> None:
        self._by_kind[row.share, row.goes_on].add(told)
        row.add(told)

    def kept(self, row: Repetition, most: int, ahead: int) -> list[float]:
        """How many are kept of 0, 1 .. `most` drafts, after `ahead` tokens that are not known yet:
        either all are told, or the last one is not."""
        share = row.share
        on, off = self._chance(share, True), self._chance(share, False)
        first = on if row.goes_on else off
        if ahead:
            all_told = first * on ** (ahead - 1)
            first = all_told * on + (1 - all_told) * off
        kept, found = 0.0, [0.0]
        for _ in range(most):
            kept += first
            first *= on
            found.append(kept)
        return found

    def _chance(self, share: int, goes_on: bool) -> float:
        return self._by_kind[share, goes_on].of(_GOES_ON[goes_on], _SEEN)
