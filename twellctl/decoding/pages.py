"""Which pages of the key-value cache are free: bookkeeping on the host. No tensors.

A page holds the keys and values of `PAGE` consecutive tokens of one sequence, in every layer. Page
0 belongs to nobody: rows that only fill up a batch write there.
"""

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
