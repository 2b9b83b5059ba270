"""What surrounds the capture of a CUDA graph."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """No garbage collection meanwhile: it may free what engines of before have left, their graphs
    and kernels, and a capture does not outlive that."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
