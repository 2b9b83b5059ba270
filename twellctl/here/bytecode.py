"""Where Python keeps the bytecode of torch and transformers, if they came without.

Some installers (uv) leave it to the first import, which may have no right to write there: then each
start compiles some 2500 modules, 10 s on an H200 machine. It goes into our cache folder instead.
"""

import contextlib
import importlib.util
import os
import sys
from pathlib import Path

from twellctl.bundle.twell_cache import cache_dir, not_private


def keep_bytecode() -> None:
    """To be called before anything heavy is imported. Who wants no bytecode written gets none."""
    if sys.dont_write_bytecode or sys.pycache_prefix:
        return
    spec = importlib.util.find_spec("torch")
    if not spec or not spec.origin or _has_place(Path(spec.origin)):
        return
    with contextlib.suppress(OSError):
        cache_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
    if not_private() is None:  # what lies there is run
        sys.pycache_prefix = str(cache_dir() / "bytecode")


def _has_place(module: Path) -> bool:
    """Whether its bytecode is there, or can be written there."""
    bytecode = Path(importlib.util.cache_from_source(str(module)))
    folder = next(path for path in bytecode.parents if path.is_dir())
    return bytecode.exists() or os.access(folder, os.W_OK)
