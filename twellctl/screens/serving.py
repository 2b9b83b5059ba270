"""The screen of `twellctl serve-local`: what is served and where, and the access log. No torch."""

import contextlib
import os
import sys
from typing import Any

from twellctl.screens import ui


def serving(served: Any, url: str) -> None:
    """Where a `ServedModel` is to be found and what it runs on, a line each."""
    engine = served.engine
    lines = {
        "page": f"{url}/",
        "API": f"{url}/v1",
        "model": served.name,
        **served.about,
        "context": f"{engine.context} tokens",
        "running": f"{engine.stats().capacity} choices side by side at most (--max-running)",
    }
    wide = max(map(len, lines))
    for name, what in lines.items():
        ui.say(f"{name:{wide}}  {what}")


def log(line: str) -> None:
    """A line of the access log. That nobody reads it any more must not end a request."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def end() -> None:
    """End the process at once, and well.

    Python's own end takes seconds, could abort on a thread whose code cannot be stopped, or wait
    for it, and a late SIGTERM would make a failure of it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
