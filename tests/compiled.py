"""The kernels as NVRTC compiles them: each file once a session for each architecture and NVRTC."""

import functools
import struct

import pytest

from twellctl.bundle.twell_cubin import sections
from twellctl.bundle.twell_nvrtc import Cubin, KernelError, Nvrtc, nvrtc_paths
from twellctl.resources import resource_dir

SOURCES = {
    path.name: path.read_bytes()
    for path in sorted(resource_dir("kernels").iterdir())
    if path.suffix in (".cu", ".cuh")
}
_SIZED, _MAX_THREADS = 4, 5  # of .nv.info: an attribute with its size; the launch bounds


@functools.cache
def nvrtc(major: int) -> Nvrtc:
    """The NVRTC of a CUDA version; skips the test if it is not here."""
    for path in nvrtc_paths():
        if path.endswith(f".{major}"):
            try:
                return Nvrtc(path)
            except (OSError, KernelError):
                continue
    pytest.skip(f"no NVRTC of CUDA {major}: pip install 'twellctl[test]' on Linux")


@functools.cache
def compiled(name: str, arch: str, major: int = 13) -> Cubin:
    """The cubin of a source; skips the test without that NVRTC."""
    return nvrtc(major).compile(name, SOURCES, arch)


def most_threads(code: bytes, entry: str) -> int:
    """The launch bounds of a kernel of a cubin, as ptxas keeps them."""
    info, at = sections(code)[f".nv.info.{entry}"].content, 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        if (form, attribute) == (_SIZED, _MAX_THREADS):
            x, y, z = struct.unpack_from("<3I", info, at + 4)
            return x * y * z
        at += 4 + (size if form == _SIZED else 0)
    raise ValueError(f"{entry} has no launch bounds")
