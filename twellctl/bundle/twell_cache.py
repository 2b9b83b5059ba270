"""The folder of what is made once on a machine and kept: compiled kernels, measured choices.

Standard library only.
"""

import os
import tempfile
from pathlib import Path


def cache_dir() -> Path:
    """The folder: TWELL_CACHE_DIR, else ~/.cache/twellctl."""
    try:
        return Path(os.environ.get("TWELL_CACHE_DIR") or "~/.cache/twellctl").expanduser()
    except RuntimeError:  # a user without a home: nothing is kept
        return Path(os.devnull)


def keep(path: Path, content: bytes) -> None:
    """Write a file of the cache, whole or not at all; without a folder to write to, not at all."""
    aside = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(dir=path.parent, prefix=".aside-")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(aside, path)
    except OSError:
        if aside is not None and os.path.exists(aside):
            os.unlink(aside)
