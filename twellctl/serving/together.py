"""Several streams read at the same time, as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")


async def together(
    streams: Sequence[AsyncGenerator[Item, None]],
) -> AsyncGenerator[dict[int, list[Item]], None]:
    """What the streams gave since the last time, in order, by their places; never nothing.

    A reader that is slow gets more at a time. All streams end with this one, and the first that
    fails ends them all with its error.
    """
    # None: a stream is through.
    events: asyncio.Queue[tuple[int, Item] | Exception | None] = asyncio.Queue()

    async def read(index: int, stream: AsyncGenerator[Item, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    events.put_nowait((index, item))
        except Exception as error:
            events.put_nowait(error)
        else:
            events.put_nowait(None)

    tasks = [asyncio.create_task(read(*numbered)) for numbered in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            come = [await events.get()]
            while not events.empty():
                come.append(events.get_nowait())
            given: dict[int, list[Item]] = {}
            for index, item in (event for event in come if isinstance(event, tuple)):
                given.setdefault(index, []).append(item)
            if given:
                yield given
            for event in come:
                if isinstance(event, Exception):
                    raise event
            left -= come.count(None)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
