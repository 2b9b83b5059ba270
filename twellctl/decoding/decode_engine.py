"""The engine that HTTP talks to: a worker thread around schedulers, events back to asyncio."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from collections.abc import Sequence as Tokens
from contextlib import contextmanager
from dataclasses import dataclass

from twellctl.decoding.engine import (
    EngineClosed,
    EngineError,
    EngineStats,
    QueueFull,
    Sampling,
    Token,
)
from twellctl.decoding.failures import failure_of
from twellctl.decoding.reports import Event
from twellctl.decoding.scheduler import Scheduler
from twellctl.decoding.sequence import Sequence, check_fits

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Client:
    """Where the events of one generation go."""

    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[Token | EngineError | None]


class DecodeEngine:
    """An `Engine` (engine.py) that continues many sequences at once."""

    def __init__(
        self, scheduler: Scheduler, max_waiting: int, beside: "DecodeEngine | None" = None
    ):
        """`beside`: the engine of a scheduler over the same cache. They have one worker, and end
        together."""
        self.context = scheduler.context
        self.vocab_size = scheduler.decoder.vocab_size
        self.max_held = scheduler.max_running + max_waiting
        self.eos_tokens = scheduler.eos_tokens
        self.drafters = scheduler.tally.names
        # of a KernelDecoder; None of others
        self.screens = getattr(scheduler.decoder, "screens", None)
        self.plan = getattr(scheduler.decoder, "plan", None)
        self._scheduler, self._max_waiting = scheduler, max_waiting
        self._arrived: deque[Sequence] = deque()
        self._worker: _Worker = _Worker() if beside is None else beside._worker
        self._worker.add(scheduler, self._arrived)

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
                self._worker.cancel(self._scheduler, sequence)

    def stats(self) -> EngineStats:
        scheduler, reports = self._scheduler, self._scheduler.reports
        pool, generated = scheduler.admission.pool, reports.generated_tokens
        return EngineStats(
            running=scheduler.admission.num_running,
            waiting=len(scheduler.admission.waiting) + len(self._arrived),
            capacity=scheduler.max_running,
            prompt_tokens=scheduler.prompt_tokens,
            generated_tokens=generated,
            cache_used=1 - pool.free / pool.capacity,
            densities=tuple((reports.fired / generated).tolist()) if generated else (),
            failed=reports.failed,
            drafted=scheduler.tally.drafted.copy(),
        )

    def close(self) -> None:
        self._worker.close()

    def _submit(self, sequence: Sequence) -> None:
        check_fits(sequence, self.context)
        with self._worker.awake():
            scheduler = self._scheduler
            queued = len(scheduler.admission.waiting) + len(self._arrived)
            if scheduler.admission.num_running + queued >= self.max_held:
                raise QueueFull(f"{self._max_waiting} generations wait already: try again later")
            self._arrived.append(sequence)


class _Worker:
    """A thread for schedulers over one cache. They take turns, a round each."""

    def __init__(self) -> None:
        self._wake = threading.Condition()  # guards what follows
        # each with the sequences that came for it
        self._schedulers: list[tuple[Scheduler, deque[Sequence]]] = []
        self._left: deque[tuple[Scheduler, Sequence]] = deque()
        self._closed = False
        self.thread = threading.Thread(target=self._work, name="decoding", daemon=True)
        self.thread.start()

    def add(self, scheduler: Scheduler, arrived: deque[Sequence]) -> None:
        """Run `scheduler` from now on, and take for it what is in `arrived`."""
        with self._wake:
            self._schedulers.append((scheduler, arrived))

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Around a change of what arrived, which the thread then sees; `EngineClosed` if it takes
        nothing new."""
        with self._wake:
            if self._closed:
                raise EngineClosed("the server is stopping")
            yield
            self._wake.notify_all()

    def cancel(self, scheduler: Scheduler, sequence: Sequence) -> None:
        """Nobody waits for a sequence any more."""
        with self._wake:
            self._left.append((scheduler, sequence))
            self._wake.notify_all()

    def close(self) -> None:
        """Take nothing new, end what runs, and stop; returns when it has."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self.thread.join()

    def _work(self) -> None:
        while (busy := self._take_in()) is not None:
            for scheduler in busy:
                try:
                    events = scheduler.advance()
                # of the device, outside of any one generation; a panic of a library is no Exception
                except BaseException as error:
                    logger.exception("the engine failed")
                    events = scheduler.fail_all(failure_of(error))
                self._send(scheduler, events)
        for scheduler, _ in self._schedulers:
            self._send(scheduler, scheduler.fail_all(EngineClosed("the server is stopping")))

    def _take_in(self) -> list[Scheduler] | None:
        """Wait for something to do, and hand it to the schedulers; those to advance, None: stop."""
        with self._wake:
            while not (self._closed or self._left or self._arrived or self._busy):
                self._wake.wait()
            for scheduler, arrived in self._schedulers:
                while arrived:
                    scheduler.add(arrived.popleft())
            while self._left:
                scheduler, sequence = self._left.popleft()
                scheduler.cancel(sequence)
            return None if self._closed else self._busy

    @property
    def _arrived(self) -> bool:
        return any(arrived for _, arrived in self._schedulers)

    @property
    def _busy(self) -> list[Scheduler]:
        return [scheduler for scheduler, _ in self._schedulers if scheduler.busy]

    def _send(self, scheduler: Scheduler, events: list[Event]) -> None:
        """Wake each event loop once."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Event]] = {}
        for event in events:
            by_loop.setdefault(event[0].client.loop, []).append(event)
        for loop, some in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, some)
            except RuntimeError:  # the loop was closed: nobody waits any more
                for sequence, _ in some:
                    scheduler.cancel(sequence)


def _put_all(events: list[Event]) -> None:
    for sequence, event in events:
        sequence.client.events.put_nowait(event)
