"""Which sequences have pages of the cache, and which ones wait for them. No tensors."""

from collections import deque
from collections.abc import Sequence as Some

from twellctl.decoding.pages import PagePool, pages_for
from twellctl.decoding.sequence import Sequence


class Admission:
    """Up to `max_running` sequences over the pages of `pool`, and a queue before them.

    Those that are `entering` have pages for their prompts, which are read, up to `together` at
    once. Those that are `running` stand in the order of their rows. One that has gone keeps its
    pages until it is let go.
    """

    def __init__(self, pool: PagePool, max_running: int, together: int):
        self.pool, self.max_running, self._together = pool, max_running, together
        self.waiting: deque[Sequence] = deque()
        self.entering: list[Sequence] = []
        self.running: list[Sequence] = []

    @property
    def all(self) -> list[Sequence]:
        return [*self.running, *self.entering, *self.waiting]

    @property
    def num_running(self) -> int:
        """Sequences that have not ended; rows of others are freed before the next ones enter."""
        return sum(not sequence.gone for sequence in [*self.running, *self.entering])

    @property
    def rows_changed(self) -> bool:
        """Whether one that runs has gone."""
        return any(sequence.gone for sequence in self.running)

    @property
    def can_enter(self) -> bool:
        """Whether there is a prompt to read: one half read, or room for the first that waits."""
        return bool(self.entering) or self._has_room()

    def enter(self, most_tokens: int) -> None:
        """Let the first one in that waits, and those after it that one forward of `most_tokens`
        reads with it."""
        longest = total = 0
        while self._has_room() and len(self.entering) < self._together:
            length = len(self.waiting[0].tokens)
            longest, total = max(longest, length), total + length
            filled_up = (len(self.entering) + 1) * longest
            if self.entering and filled_up > min(most_tokens, 2 * total):
                break
            if (pages := self.pool.take(pages_for(length))) is None:
                break
            sequence = self.waiting.popleft()
            sequence.pages += pages
            self.entering.append(sequence)

    def begin(self, sequences: Some[Sequence]) -> None:
        """They have entered, and run from now on."""
        self.entering = [s for s in self.entering if s not in sequences]
        self.running += sequences

    def let_go(self) -> None:
        """Of those that have gone, free the pages."""
        for sequence in [*self.running, *self.entering]:
            if sequence.gone:
                self.pool.give_back(sequence.pages)
        self.running = [sequence for sequence in self.running if not sequence.gone]
        self.entering = [sequence for sequence in self.entering if not sequence.gone]

    def give_pages(self, num_tokens: int) -> None:
        """A page to each row that needs one for a round of `num_tokens`, the oldest first, if need
        be from the youngest."""
        for sequence in sorted(self.running, key=lambda sequence: sequence.number):
            while sequence.pages and sequence.needs_page(num_tokens):
                if pages := self.pool.take(1):
                    sequence.pages += pages
                else:
                    self._evict()

    def _has_room(self) -> bool:
        if not self.waiting or self.num_running >= self.max_running:
            return False
        # those that run may need a page each before this one is through
        needed = pages_for(len(self.waiting[0].tokens)) + self.num_running
        return self.pool.free >= min(needed, self.pool.capacity)

    def _evict(self) -> None:
        """Take the pages of the youngest, which waits again, before all others."""
        youngest = max([*self.running, *self.entering], key=lambda sequence: sequence.number)
        self.pool.give_back(youngest.pages)
        youngest.cached = 0
        (self.entering if youngest in self.entering else self.running).remove(youngest)
        self.waiting.appendleft(youngest)
