"""Requests made ready in threads of their own, few at a time: none holds up the server or its end.

A chat template is a program, and a tokenizer may take seconds for a prompt of megabytes. No torch.
"""

import asyncio
import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from twellctl.decoding.engine import Engine, QueueFull

Made = TypeVar("Made")
THREAD = "preparing"  # the name of all threads here
SMALL_BYTES = 1 << 16  # of a body; larger ones wait for each other, and no smaller one for them
MOST_BYTES = 128 << 20  # of all bodies here
STUCK_SECONDS = 30.0  # a thread that takes longer: no prompt gets through


class _Stopped(BaseException):
    """What ends Python code that nobody waits for any more; no library takes it for a failure."""


class Preparing:
    """Two threads at most, one for small bodies, one for large ones. For one event loop."""

    def __init__(self, engines: Sequence[Engine]):
        self._engines, self._most = engines, sum(engine.max_held for engine in engines)
        self._small, self._large = _Lane(), _Lane()
        self._num_here = self._num_bytes = 0

    @property
    def stuck(self) -> bool:
        """Whether a thread is at one request for longer than any should take."""
        return self._small.seconds > STUCK_SECONDS or self._large.seconds > STUCK_SECONDS

    async def __call__(self, body: bytes, make: Callable[[bytes], Made]) -> Made:
        """`make(body)`, as soon as there is a thread for it.

        `QueueFull` if as many wait as the engines take. Who is cancelled waits no longer; code that
        runs for him is stopped where it is in Python, and keeps its thread until it has ended.
        """
        held = [engine.stats() for engine in self._engines]
        full = self._num_here + sum(of.running + of.waiting for of in held) >= self._most
        if full or self._num_bytes + len(body) > MOST_BYTES:
            raise QueueFull(f"{self._num_here} prompts wait already: try again later")
        self._num_here, self._num_bytes = self._num_here + 1, self._num_bytes + len(body)
        try:
            lane = self._small if len(body) <= SMALL_BYTES else self._large
            return await lane.run(lambda: make(body))
        finally:
            self._num_here, self._num_bytes = self._num_here - 1, self._num_bytes - len(body)


class _Lane:
    """One daemon thread at a time, a new one for each job."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._began: float | None = None

    @property
    def seconds(self) -> float:
        """For how long the job in it has run."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    async def run(self, job: Callable[[], Made]) -> Made:
        await self._turn.acquire()
        self._began = time.monotonic()
        thread, done = in_daemon_thread(job, self._free)
        try:
            return await done
        except asyncio.CancelledError:
            _stop(thread)
            raise

    def _free(self) -> None:
        self._began = None
        self._turn.release()


def in_daemon_thread(
    job: Callable[[], Made], then: Callable[[], None] = lambda: None
) -> tuple[threading.Thread, "asyncio.Future[Made]"]:
    """`job` in a thread that the end of the process does not wait for, and its result to await.

    `then` is called in the event loop once the job has ended, awaited or not.
    """
    job_of_thread = _Job(job, then)
    thread = threading.Thread(target=job_of_thread.run, name=THREAD, daemon=True)
    thread.start()
    return thread, job_of_thread.done


class _Job(Generic[Made]):
    """A job for another thread, and the future of this event loop that gets its result."""

    def __init__(self, job: Callable[[], Made], then: Callable[[], None]):
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[Made] = self._loop.create_future()
        self._job, self._then = job, then
        self._has_ended = False

    def run(self) -> None:
        """The job, in its thread."""
        settle: Callable[[], None]
        try:
            settle = partial(self._settle, self.done.set_result, self._job())
        except Exception as failure:
            settle = partial(self._settle, self.done.set_exception, failure)
        except _Stopped:  # nobody waits for it
            settle = partial(self._settle, self.done.set_exception, TimeoutError())
        self._hand_over(settle)

    def _hand_over(self, settle: Callable[[], None]) -> None:
        """Let the event loop call `settle`, although `_Stopped` may come here, once."""
        for _ in range(2):
            try:
                with contextlib.suppress(RuntimeError):  # the loop was closed
                    self._loop.call_soon_threadsafe(settle)
                return
            except _Stopped:
                continue

    def _settle(self, set_outcome: Callable[[Any], None], outcome: Any) -> None:
        """In the event loop, and perhaps twice."""
        if self._has_ended:
            return
        self._has_ended = True
        if not self.done.done():
            set_outcome(outcome)
        self._then()


def _stop(thread: threading.Thread) -> None:
    """Raise `_Stopped` in `thread` as soon as it runs Python code; nothing if it has ended."""
    if thread.ident is not None:
        number = ctypes.c_ulong(thread.ident)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(_Stopped))
