"""The answers under way, and whether new ones are taken: what a server that stops waits for."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from twellctl.decoding.engine import EngineClosed


class Traffic:
    """Counts answers; after `refuse_more` no new one begins."""

    def __init__(self) -> None:
        self.draining = False
        self._num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Around one answer; raises `EngineClosed` if no more are taken."""
        if self.draining:
            raise EngineClosed("the server is stopping")
        self._num_running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._idle.set()

    def refuse_more(self) -> None:
        self.draining = True

    async def idle(self) -> None:
        """Returns once nothing is being answered."""
        await self._idle.wait()
