"""The kernels of this installation, known to the code that launches them."""

import functools

from twellctl.bundle.twell_launch import register_sources
from twellctl.here.resources import kernel_files


@functools.cache
def own_kernels() -> str:
    """Register all of them; returns what `sparse_ffn` and `kernels_for` take as `sources`."""
    return register_sources(kernel_files())
