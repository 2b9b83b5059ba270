"""Grammars of clients' schemas are built off the event loop, within limits of time and memory.

A grammar can take minutes and gigabytes to build, and nothing stops the library that builds it. So
another process (`grammar_trial`) builds each one first: at a limit, or when its client leaves, that
process is ended. What passed is then built here, in a thread, which takes as long again.
"""

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from twellctl.decoding.engine import Guide, QueueFull
from twellctl.serving.guides import Grammar, Guides
from twellctl.serving.preparing import in_daemon_thread

SECONDS = 5  # of a processor
BYTES = 256 << 20
_TRIAL = Path(__file__).with_name("grammar_trial.py")


class Grammars:
    """Gives each schema its guide, one schema at a time. For one event loop."""

    def __init__(self, guides: Guides, most_waiting: int):
        self._guides, self._most_waiting = guides, most_waiting
        self._num_here = 0
        self._turn = asyncio.Lock()
        self._trial: _Trial | None = None

    async def __call__(self, grammar: Grammar) -> Callable[[], Guide]:
        """What gives each text the guide of a `grammar`.

        `ApiError` for one that is wrong or takes too much, `QueueFull` if too many wait. It is
        tried no longer once the caller is cancelled.
        """
        if self._num_here >= self._most_waiting:
            raise QueueFull(f"{self._num_here} schemas wait already: try again later")
        self._num_here += 1
        try:
            async with self._turn:
                try:
                    error = await self._tried(grammar.text)
                except BaseException:  # the process may be in the middle of it
                    await self.close()
                    raise
                if error:
                    raise grammar.error(error)
                _, built = in_daemon_thread(partial(self._guides.build, grammar))
                return await built
        finally:
            self._num_here -= 1

    async def close(self) -> None:
        """End the process, if there is one."""
        trial, self._trial = self._trial, None
        if trial is not None:
            if trial.process.returncode is None:
                trial.process.kill()
            await trial.process.wait()

    async def _tried(self, grammar: str) -> str:
        """The error in `grammar`, or ""."""
        trial = self._trial or await self._started()
        error = await trial.answer(grammar)
        if error is None:
            await self.close()
            return f"the schema takes more than {SECONDS} s or {BYTES >> 20} MiB: make it simpler"
        return error

    async def _started(self) -> "_Trial":
        """A new process that has read the tokens; Ctrl-C in a terminal does not reach it."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            str(_TRIAL),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            start_new_session=True,
        )
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("a process was started without its pipes")
        self._trial = trial = _Trial(process, process.stdout, process.stdin)
        if await trial.answer(self._guides.tokens() | {"seconds": SECONDS, "bytes": BYTES}) is None:
            raise RuntimeError("the process that tries grammars did not start")
        return trial


@dataclass(frozen=True)
class _Trial:
    """The process of `grammar_trial`, and its lines."""

    process: Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def answer(self, what: Any) -> str | None:
        """The line that answers `what`; None if the process has ended."""
        with contextlib.suppress(ConnectionError):  # then there is no line, either
            self.writer.write(json.dumps(what).encode() + b"\n")
            await self.writer.drain()
        line = await self.reader.readline()
        return json.loads(line) if line else None
