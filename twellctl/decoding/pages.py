"""Which pages of the key-value cache are free: bookkeeping on the host. No tensors.

A page holds the keys and values of `PAGE` consecutive tokens of one sequence, in every layer. Page
0 belongs to nobody: rows that only fill up a batch write there.
"""

import bisect

from twellctl.bundle.twell_spec import PAGE


def pages_for(num_tokens: int) -> int:
    """How many pages hold that many tokens."""
    return -(-num_tokens // PAGE)


class PagePool:
    """Pages 1 to `num_pages` - 1, lent and given back."""

    def __init__(self, num_pages: int):
        self.capacity = self.free = num_pages - 1
        # of free pages, ascending, with a lent page between two
        self._runs = [range(1, num_pages)] if self.capacity else []
        self._lent: set[int] = set()

    def take(self, count: int) -> list[int] | None:
        """That many pages, or None if fewer are free; then none is taken."""
        if count > self.free:
            return None
        pages: list[int] = []
        while len(pages) < count:
            pages += self._cut(0, count - len(pages))
        return pages

    def take_run(self, count: int) -> list[int] | None:
        """That many consecutive pages, the first that there are, or None if there are none."""
        for i, run in enumerate(self._runs):
            if len(run) >= count:
                return self._cut(i, count)
        return None

    def give_back(self, pages: list[int]) -> None:
        """Free pages that were lent, and empty the list. `KeyError` for a page that was not."""
        for page in pages:
            self._lent.remove(page)
            self._free(page)
        pages.clear()

    def _cut(self, i: int, count: int) -> list[int]:
        """Lend up to `count` pages from the front of run `i`."""
        run = self._runs[i]
        pages, rest = list(run[:count]), run[count:]
        self._runs[i : i + 1] = [rest] if rest else []
        self._lent.update(pages)
        self.free -= len(pages)
        return pages

    def _free(self, page: int) -> None:
        """A page more, in one run with its neighbours if they are free."""
        at = bisect.bisect(self._runs, page, key=lambda run: run.start)
        first, last = at, at
        start, stop = page, page + 1
        if at > 0 and self._runs[at - 1].stop == page:
            first, start = at - 1, self._runs[at - 1].start
        if at < len(self._runs) and self._runs[at].start == stop:
            last, stop = at + 1, self._runs[at].stop
        self._runs[first:last] = [range(start, stop)]
        self.free += 1
