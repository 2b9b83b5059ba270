"""What is measured of each request, for /metrics and for the access log, which is here.

That has a line a request, and nothing of what was asked or answered in it.
"""

import asyncio
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from twellctl.decoding.drafted import Drafted
from twellctl.errors import bounded, printable
from twellctl.serving.http_errors import as_api_error

_LONGEST_PATH = 200  # characters
CLIENT_LEFT = 499  # nginx's number for it; no client ever sees it


@dataclass
class Measured:
    """The request that this task answers; `status` and `seconds` are right once it is answered."""

    began: float = field(default_factory=time.perf_counter)
    status: int = 500
    seconds: float = 0.0
    failed_with: int | None = None  # the status that came too late to be sent
    prompt_tokens: int | None = None  # None: there was no prompt, or none that could be read
    new_tokens: int = 0  # of all choices, also when no client took them
    drafted: Drafted = field(default_factory=Drafted)  # of all choices


Observer = Callable[[web.Request, Measured], None]
_current: ContextVar[Measured] = ContextVar("measured")


def current() -> Measured:
    """The request's for which this task, or the one that started it, works."""
    return _current.get()


def measuring(*observers: Observer):
    """The outermost middleware: it calls each observer once a request is answered."""

    @web.middleware
    async def measure(http: web.Request, handler: Handler) -> web.StreamResponse:
        measured = Measured()
        _current.set(measured)
        try:
            response = await handler(http)
            measured.status = measured.failed_with or response.status
            return response
        except asyncio.CancelledError:
            measured.status = CLIENT_LEFT
            raise
        finally:
            measured.seconds = time.perf_counter() - measured.began
            for observe in observers:
                observe(http, measured)

    return measure


def note_failure(http: web.Request, error: Exception) -> dict[str, Any]:
    """The error object for a stream whose status 200 is out; it is counted as what it is."""
    failure = as_api_error(error, http)
    current().failed_with = failure.status
    return failure.body()


def access_log(write: Callable[[str], None]) -> Observer:
    """An observer that gives `write` a line for each request.

    `TIME CLIENT METHOD PATH STATUS READ+WRITTEN tokens MILLISECONDS ms`, a `-` for the tokens of
    what has none, and what became of drafts, if there were any. The query is left out: it may hold
    what a client should have sent as a header.
    """

    def observe(http: web.Request, measured: Measured) -> None:
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        path = bounded(http.rel_url.raw_path, _LONGEST_PATH)
        asked = printable(f"{http.remote or '-'} {http.method} {path}")
        tokens = "-"
        if measured.prompt_tokens is not None:
            tokens = f"{measured.prompt_tokens}+{measured.new_tokens} tokens"
        drafted = f", {measured.drafted}" if measured.drafted.num_read else ""
        took = f"{1000 * measured.seconds:.0f} ms"
        write(f"{when} {asked} {measured.status} {tokens} {took}{drafted}")

    return observe
