"""Ctrl-C, which may come at any moment: while modules are imported, inside of a library's C code.

Python raises KeyboardInterrupt between any two bytecodes. C++ that was calling back into Python may
abort on it, or raise an error of its own in its place; in a finalizer it is printed and lost. So it
is kept in mind here that Ctrl-C came, for whoever tells of the error that followed.
"""

import atexit
import contextlib
import gc
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

EXIT_CODE = 130
_AGAIN_SECONDS = 0.01
_came = False
_was_reported = False


def heed() -> None:
    """From now on Ctrl-C is `KeyboardInterrupt`, and `came()` true. For the main thread.

    If Ctrl-C was ignored when this process started, as in a shell's background job, it stays so.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGALRM, _interrupt)
    sys.unraisablehook = _not_lost
    atexit.register(_last)  # registered first, so it runs after all others


def heed_no_more() -> None:
    """The process ends with the `SystemExit` that is raised; Ctrl-C ends it at once."""
    global _was_reported
    _was_reported = getattr(sys.exception(), "code", None) == EXIT_CODE
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, _end)
        signal.signal(signal.SIGALRM, _end)


def ignore() -> None:
    """All is done, and is to end as if no other Ctrl-C came."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextlib.contextmanager
def first_kept() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C only makes what is given true; the next one is as ever."""
    before, kept = signal.getsignal(signal.SIGINT), []

    def keep(signum: int, frame: types.FrameType | None) -> None:
        kept.append(signum)
        signal.signal(signal.SIGINT, before)

    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, keep)
    try:
        yield lambda: bool(kept)
    finally:
        signal.signal(signal.SIGINT, before)


def forget() -> None:
    """A Ctrl-C that came is dealt with: errors from here on are none of its consequences."""
    global _came
    _came = False


def came() -> bool:
    """Whether there was a Ctrl-C: an error after it is its consequence."""
    return _came


def _interrupt(signum: int, frame: types.FrameType | None) -> None:
    global _came
    _came = True
    torch = sys.modules.get("torch")
    if getattr(getattr(torch, "__spec__", None), "_initializing", False):
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)  # its C++ would abort now
        return
    raise KeyboardInterrupt


def _end(signum: int, frame: types.FrameType | None) -> None:
    """End this process now, with the code and the line of an interruption."""
    if not _was_reported:
        with contextlib.suppress(OSError):  # it may have ended who reads stderr, too
            os.write(2, b"error: interrupted\n")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(EXIT_CODE)


def _last() -> None:
    """The last exit handler.

    If Ctrl-C went through `exec` of a text (imports do that), Python would end itself by SIGINT and
    not with the code: so an interrupted process ends here.
    """
    if _was_reported:
        _end(signal.SIGINT, None)
    ignore()
    gc.freeze()  # else Python looks through all that was imported, which takes a second


def _not_lost(unraisable: Any) -> None:
    """A finalizer cannot be interrupted: what it is part of is, right after it."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
    else:
        sys.__unraisablehook__(unraisable)
