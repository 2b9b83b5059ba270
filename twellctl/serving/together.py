"""Several streams read at the same time, as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")


async def together(
    streams: Sequence[AsyncGenerator[Item, None]],
) -> AsyncGenerator[tuple[int, Item], None]:
    """(which stream, what it gave), as it comes.

    All streams end with this one, and the first that fails ends them all with its error.
    """
    # None: a stream is through. One place: a reader that is slow holds the streams back.
    events: asyncio.Queue[tuple[int, Item] | Exception | None] = asyncio.Queue(1)

    async def read(index: int, stream: AsyncGenerator[Item, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await events.put((index, item))
        except Exception as error:
            await events.put(error)
        else:
            await events.put(None)

    tasks = [asyncio.create_task(read(*numbered)) for numbered in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            event = await events.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                left -= 1
            else:
                yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
