"""The kernels of this installation, known to the code that launches them."""

import functools

from twellctl.bundle.twell_model import kernel_sources
from twellctl.resources import bundle_files


@functools.cache
def own_kernels() -> str:
    """Register them; returns what `sparse_ffn` and `kernels_for` take as `sources`."""
    return kernel_sources({name: path.read_bytes() for name, path in bundle_files().items()})
