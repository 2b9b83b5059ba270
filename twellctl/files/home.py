"""Paths that begin with ~, as Python, YAML and --flag=~/file give them: no shell has seen them."""

import errno
import os
from pathlib import Path

from twellctl.errors import TwellError, UsageError, shown


def from_home(path: str | Path) -> Path:
    """`path`, its ~ or ~user replaced by the home folder, if there is such a user.

    `UsageError` for what the system takes for no path, `TwellError` for a loop of links.
    """
    if "\0" in str(path):
        raise UsageError(f"{shown(str(path))} is not a path: it contains a NUL character")
    path = Path(os.path.expanduser(path))
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise TwellError(f"{path} leads to itself: {error.strerror}") from None
    return path
