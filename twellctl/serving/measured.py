"""What is measured of each request, for all who tell of it: /metrics and the access log."""

import asyncio
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from twellctl.serving.http_errors import as_api_error

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


Observer = Callable[[web.Request, Measured], None]
_current: ContextVar[Measured] = ContextVar("measured")


def current() -> Measured:
    """The request's for which this task, or the one that started it, works."""
    return _current.get()


def measuring(*observers: Observer):
    """The middleware around all others: each observer is told of a request once it is answered."""

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
