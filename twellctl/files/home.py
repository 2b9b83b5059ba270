"""Paths that begin with ~, as Python, YAML and --flag=~/file give them: no shell has seen them."""

import os
from pathlib import Path


def from_home(path: str | Path) -> Path:
    """`path`, its ~ or ~user replaced by the home folder, if there is such a user."""
    return Path(os.path.expanduser(path))
