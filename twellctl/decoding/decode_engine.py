"""The engine that HTTP talks to: a worker thread around a scheduler, events back to asyncio."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from twellctl.decoding.engine import (
    EngineClosed,
    EngineError,
    EngineStats,
    QueueFull,
    Sampling,
    Token,
)
from twellctl.decoding.scheduler import Event, Scheduler, check_fits, failure_of
from twellctl.decoding.sequence import Sequence

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Client:
    """Where the events of one generation go."""

    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[Token | EngineError | None]


class DecodeEngine:
    """An `Engine` (engine.py) that continues many sequences at once."""

    def __init__(self, scheduler: Scheduler, max_waiting: int):
        self.context = scheduler.context
        self.vocab_size = scheduler.decoder.vocab_size
        self.max_held = scheduler.max_running + max_waiting
        self.eos_tokens = scheduler.eos_tokens
        # of a KernelDecoder; None of others
        self.screens = getattr(scheduler.decoder, "screens", None)
        self.plan = getattr(scheduler.decoder, "plan", None)
        self._scheduler, self._max_waiting = scheduler, max_waiting
        self._wake = threading.Condition()  # guards what follows
        self._arrived: deque[Sequence] = deque()
        self._left: deque[Sequence] = deque()
        self._closed = False
        self._worker = threading.Thread(target=self._work, name="decoding", daemon=True)
        self._worker.start()

    async def generate(
        self, prompt: Tokens[int], sampling: Sampling
    ) -> AsyncGenerator[Token, None]:
        client = _Client(asyncio.get_running_loop(), asyncio.Queue())
        sequence = Sequence(prompt, sampling, client)
        self._submit(sequence)
        try:
            while (event := await client.events.get()) is not None:
                if isinstance(event, EngineError):
                    raise event
                yield event
        finally:
            if not sequence.gone:
                with self._wake:
                    self._left.append(sequence)
                    self._wake.notify_all()

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        pool, generated = scheduler.pool, scheduler.generated_tokens
        return EngineStats(
            running=scheduler.num_running,
            waiting=len(scheduler.waiting) + len(self._arrived),
            capacity=scheduler.max_running,
            prompt_tokens=scheduler.prompt_tokens,
            generated_tokens=generated,
            cache_used=1 - pool.free / pool.capacity,
            densities=tuple((scheduler.fired / generated).tolist()) if generated else (),
            failed=scheduler.failed,
            passes=scheduler.tally.passes,
            drafted=scheduler.tally.drafted,
            kept_drafts=scheduler.tally.kept,
        )

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self._worker.join()

    def _submit(self, sequence: Sequence) -> None:
        check_fits(sequence, self.context)
        with self._wake:
            if self._closed:
                raise EngineClosed("the server is stopping")
            scheduler = self._scheduler
            here = scheduler.num_running + len(scheduler.waiting) + len(self._arrived)
            if here >= self.max_held:
                raise QueueFull(f"{self._max_waiting} generations wait already: try again later")
            self._arrived.append(sequence)
            self._wake.notify_all()

    # ---- the worker ----

    def _work(self) -> None:
        while self._take_in():
            try:
                events = self._scheduler.advance()
            # of the device, outside of any one generation; a panic of a library is no Exception
            except BaseException as error:
                logger.exception("the engine failed")
                events = self._scheduler.fail_all(failure_of(error))
            self._send(events)
        self._send(self._scheduler.fail_all(EngineClosed("the server is stopping")))

    def _take_in(self) -> bool:
        """Wait for something to do, and hand it to the scheduler; False: stop."""
        with self._wake:
            while not (self._arrived or self._left or self._closed or self._scheduler.busy):
                self._wake.wait()
            while self._arrived:
                self._scheduler.add(self._arrived.popleft())
            while self._left:
                self._scheduler.cancel(self._left.popleft())
            return not self._closed

    def _send(self, events: list[Event]) -> None:
        """Wake each event loop once."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Event]] = {}
        for event in events:
            by_loop.setdefault(event[0].client.loop, []).append(event)
        for loop, some in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, some)
            except RuntimeError:  # the loop was closed: nobody waits any more
                for sequence, _ in some:
                    self._scheduler.cancel(sequence)


def _put_all(events: list[Event]) -> None:
    for sequence, event in events:
        sequence.client.events.put_nowait(event)
