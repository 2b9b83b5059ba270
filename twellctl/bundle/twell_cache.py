"""The folder of what is made once on a machine and kept: compiled kernels, measured plans.

What lies there is run. So the folder is made for its owner alone, and nothing is read from one, or
from a file, that another user than this one or root has, or may write. Standard library only.

Here is the log, too, of what goes without the kernels: each reason once.
"""

import contextlib
import functools
import json
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


@functools.cache
def say_once(reason: str) -> None:
    logger.warning("TwELL kernels are not used, plain PyTorch is: %s", reason)


class _Collecting(logging.Handler):
    """Keeps messages in a list."""

    def __init__(self, messages: list[str]):
        super().__init__()
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(record.getMessage())


@contextlib.contextmanager
def reasons_said() -> Iterator[list[str]]:
    """Collect what calls in the block say of going without the kernels; the log has none of it."""
    said: list[str] = []
    handler = _Collecting(said)
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    say_once.cache_clear()
    try:
        yield said
    finally:
        say_once.cache_clear()
        logger.removeHandler(handler)
        logger.propagate = propagate


PLANS = "plans.json"  # those of twell_choice.py
_told: set[Path] = set()


def cache_dir() -> Path:
    """The folder: TWELL_CACHE_DIR, else ~/.cache/twellctl."""
    try:
        return Path(os.environ.get("TWELL_CACHE_DIR") or "~/.cache/twellctl").expanduser()
    except RuntimeError:  # a user without a home: nothing is kept
        return Path(os.devnull)


def not_private() -> str | None:
    """Why nothing is read from the folder or written there; None if it is private, or not there."""
    folder = cache_dir()
    try:
        found = folder.stat()
    except OSError:
        return None
    if not stat.S_ISDIR(found.st_mode) or _is_private(found):
        return None
    if not os.environ.get("TWELL_CACHE_DIR") and found.st_uid == os.geteuid():
        with contextlib.suppress(OSError):  # made by an older version, under a generous umask
            folder.chmod(0o700)
            return None
    return f"{folder} is another user's, or others may write there: nothing of it is used"


def kept(name: str) -> bytes | None:
    """The content of a file of the cache; None if there is none, or it may be another user's."""
    if _is_refused():
        return None
    try:
        # a pipe does not answer, and a link may lead anywhere
        file = os.open(cache_dir() / name, os.O_RDONLY | _flag("NOFOLLOW") | _flag("NONBLOCK"))
        with open(file, "rb") as opened:
            found = os.fstat(file)
            sound = stat.S_ISREG(found.st_mode) and _is_private(found)
            return opened.read() if sound else None
    except OSError:
        return None


def keep(name: str, content: bytes) -> None:
    """Write a file of the cache, whole or not at all; without a folder to write to, not at all."""
    folder, aside = cache_dir(), None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_refused():
            return
        handle, aside = tempfile.mkstemp(dir=folder, prefix=".aside-")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(aside, folder / name)
    except OSError:
        if aside is not None and os.path.exists(aside):
            os.unlink(aside)


def kept_json(name: str) -> dict[str, Any]:
    """The content of a JSON file of the cache; nothing if it is none that makes sense."""
    try:
        found = json.loads(kept(name) or b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside no other process changes what is kept, where the file system has locks."""
    try:
        import fcntl

        folder = os.open(cache_dir(), os.O_RDONLY)
    except (ImportError, OSError):
        yield
        return
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _is_refused() -> bool:
    why = not_private()
    if why is not None and cache_dir() not in _told:
        _told.add(cache_dir())
        logger.warning("%s", why)
    return why is not None


def _is_private(found: os.stat_result) -> bool:
    if not hasattr(os, "geteuid"):  # Windows, which has no such modes
        return True
    return found.st_uid in (os.geteuid(), 0) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _flag(name: str) -> int:
    return getattr(os, f"O_{name}", 0)
