"""The version of this twellctl, with its commit where that is known."""

import functools
import json
import subprocess
from importlib import metadata
from pathlib import Path

from twellctl.version import __version__

_CHECKOUT = Path(__file__).resolve().parents[2]


@functools.cache
def own_version() -> str:
    """Like "0.1.0+gb80e6c1f2a3b", with ".dirty" for a checkout that holds changes.

    The commit is that of the checkout it runs from, or of the repository pip installed it from;
    without either it is the version alone.
    """
    commit = _of_checkout() or _of_installation()
    return f"{__version__}+g{commit}" if commit else __version__


def _of_checkout() -> str | None:
    if not (_CHECKOUT / ".git").exists():
        return None
    words = ["describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=.dirty"]
    try:
        done = subprocess.run(
            ["git", "-C", str(_CHECKOUT), *words], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _of_installation() -> str | None:
    try:
        said = metadata.distribution("twellctl").read_text("direct_url.json")
        return json.loads(said or "{}")["vcs_info"]["commit_id"][:12]
    except (metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        return None
