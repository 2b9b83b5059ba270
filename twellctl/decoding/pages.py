"""Which pages of the key-value cache are free: bookkeeping on the host. No tensors.

A page holds the keys and values of `PAGE` consecutive tokens of one sequence, in every layer. Page
0 belongs to nobody: rows that only fill up a batch write there.
"""

import bisect

from twellctl.bundle.twell_spec import PAGE


def pages_for(num_tokens: int) -> int:
    """How many pages hold so many tokens."""
    return -(-num_tokens // PAGE)


class PagePool:
    """Pages 1 to `num_pages` - 1, lent and given back."""

    def __init__(self, num_pages: int):
        self.capacity = num_pages - 1
        self._free = list(range(self.capacity, 0, -1))
        self._lent: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """So many pages, or None if fewer are free; then none is taken."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        self._lent.update(pages)
        return pages

    def give_back(self, pages: list[int]) -> None:
        """Free pages that were lent, and empty the list. `KeyError` for a page that was not."""
        for page in pages:
            self._lent.remove(page)
        self._free.extend(reversed(pages))
        pages.clear()


class RunPool:
    """The same for those who need consecutive pages: the first run that is long enough is lent."""

    def __init__(self, num_pages: int):
        self.capacity = num_pages - 1
        self._free = [range(1, num_pages)]  # ascending, with something lent between two

    def take(self, count: int) -> range | None:
        """So many pages, or None if there is no such run."""
        for i, run in enumerate(self._free):
            if len(run) >= count:
                self._free[i : i + 1] = [rest] if (rest := run[count:]) else []
                return run[:count]
        return None

    def give_back(self, pages: range) -> None:
        """Free a run that was lent."""
        at = bisect.bisect(self._free, pages.start, key=lambda run: run.start)
        before, after = self._free[max(at - 1, 0) : at], self._free[at : at + 1]
        if before and before[0].stop == pages.start:
            pages, at = range(before[0].start, pages.stop), at - 1
        else:
            before = []
        if after and after[0].start == pages.stop:
            pages = range(pages.start, after[0].stop)
        else:
            after = []
        self._free[at : at + len(before) + len(after)] = [pages]
