"""The access log: a line a request, and nothing of what was asked or answered in it."""

import time
from collections.abc import Callable

from aiohttp import web

from twellctl.errors import bounded, printable
from twellctl.serving.measured import Measured, Observer

_LONGEST_PATH = 200  # characters


def access_log(write: Callable[[str], None]) -> Observer:
    """An observer that gives `write` a line for each request.

    `TIME CLIENT METHOD PATH STATUS READ+WRITTEN tokens MILLISECONDS ms`, a `-` for the tokens of
    what has none. The query is left out: it may hold what a client should have sent as a header.
    """

    def observe(http: web.Request, measured: Measured) -> None:
        write(_line(http, measured))

    return observe


def _line(http: web.Request, measured: Measured) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    path = bounded(http.rel_url.raw_path, _LONGEST_PATH)
    asked = printable(f"{http.remote or '-'} {http.method} {path}")
    tokens = "-"
    if measured.prompt_tokens is not None:
        tokens = f"{measured.prompt_tokens}+{measured.new_tokens} tokens"
    return f"{when} {asked} {measured.status} {tokens} {1000 * measured.seconds:.0f} ms"
