"""Streams that are read side by side."""

import asyncio
from contextlib import aclosing

import pytest

from twellctl.serving.completion import together


class Source:
    def __init__(self, items, *, delay=0.0, failure=None):
        self.items, self.delay, self.failure = items, delay, failure
        self.closed = False

    async def stream(self):
        try:
            for item in self.items:
                await asyncio.sleep(self.delay)
                yield item
            if self.failure:
                raise self.failure
        finally:
            self.closed = True


async def all_of(*sources):
    async with aclosing(together([source.stream() for source in sources])) as merged:
        return [(i, x) async for given in merged for i, items in given.items() for x in items]


def test_each_keeps_its_order_and_none_waits_for_another():
    slow, fast = Source("abc", delay=0.05), Source("defg", delay=0.001)
    got = asyncio.run(all_of(slow, fast))
    assert [item for index, item in got if index == 0] == list("abc")
    assert got[:4] == [(1, "d"), (1, "e"), (1, "f"), (1, "g")]
    assert asyncio.run(all_of()) == []


def test_a_failure_ends_them_all():
    endless = Source(range(10**9), delay=0.001)
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(all_of(endless, Source("ab", failure=ValueError("broken"))))
    assert endless.closed


def test_a_slow_reader_gets_more_at_a_time():
    async def read():
        sizes = []
        async with aclosing(together([Source(range(50), delay=0.002).stream()])) as merged:
            async for given in merged:
                sizes.append(len(given[0]))
                await asyncio.sleep(0.03)
        return sizes

    sizes = asyncio.run(read())
    assert sum(sizes) == 50
    assert len(sizes) < 25
