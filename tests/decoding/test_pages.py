"""Bookkeeping of pages."""

import random

import pytest

from twellctl.decoding.pages import PagePool


@pytest.mark.parametrize("seed", range(5))
def test_no_page_is_lent_twice_and_none_is_lost(seed):
    draw = random.Random(seed)
    pool, held = PagePool(num_pages=17), []
    assert pool.capacity == 16
    for _ in range(300):
        if held and draw.random() < 0.5:
            pool.give_back(pages := held.pop(draw.randrange(len(held))))
            assert pages == []
        else:
            count, free = draw.randint(0, 6), pool.free
            pages = pool.take(count)
            assert (pages is None) == (count > free)
            if pages is not None:
                assert len(pages) == count
                held.append(pages)
        lent = [page for pages in held for page in pages]
        assert len(set(lent)) == len(lent)
        assert set(lent) <= set(range(1, 17))  # never the one that belongs to nobody
        assert pool.free + len(lent) == pool.capacity


def test_a_page_that_was_not_lent_is_not_taken_back():
    pool = PagePool(4)
    pages = pool.take(2)
    again = list(pages)
    pool.give_back(pages)
    with pytest.raises(KeyError):
        pool.give_back(again)
