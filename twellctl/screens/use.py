"""What the commands that use a model say: doctor, generate and chat, serve-local. No torch."""

import contextlib
import os
import sys
from typing import Any

from twellctl.errors import counted
from twellctl.screens import ui


def diagnosed(result: Any) -> None:
    """The findings of a `Diagnosis`, each with what to do about it."""
    for finding in (*result.machine, *result.folder):
        ui.say(f"{finding.state:5}{finding.name:12}{finding.what}")
        if finding.advice:
            ui.say(f"{'':17}-> {finding.advice}")


def generated(figures: Any) -> None:
    """What a generation has done (a `Figures`), on stderr; nothing if nothing came."""
    if not figures.tokens:
        return
    if figures.is_empty:
        ui.note("the model ended its answer at once, without a word")
    parts = [f"{figures.prompt_tokens} + {counted(figures.tokens, 'token')}"]
    parts.append(f"the first after {figures.first_seconds:.2f} s")
    if figures.tokens_per_second is not None:
        parts.append(f"then {figures.tokens_per_second:.1f} tokens/s")
    if figures.drafted is not None:
        parts.append(str(figures.drafted) or "no drafts")
    if figures.density is not None:
        parts.append(f"{figures.density:.2%} of the neurons fired")
    if figures.cut:
        parts.append("cut where the context ends" if figures.full else "cut at --max-tokens")
    ui.note(", ".join(parts))


def serving(served: Any, url: str) -> None:
    """Where a `ServedModel` is to be found and what it runs on, a line each."""
    engine = served.engine
    running = [f"{engine.stats().capacity} concurrent choices at most (--max-running)"]
    for other, name in list(served.engines.items())[1:]:
        running.append(f"{other.stats().capacity} of {name}")
    lines = {
        "page": f"{url}/",
        "API": f"{url}/v1",
        "model": served.name,
        **served.about,
        "context": f"{engine.context} tokens",
        "running": ", and ".join(running),
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
