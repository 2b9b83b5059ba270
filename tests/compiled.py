"""The kernels as NVRTC compiles them: each file once a session for each architecture and NVRTC.

The processes of a session share what they compile through a folder, which conftest.py makes.
"""

import fcntl
import functools
import math
import os
import pickle
import struct
from pathlib import Path

import pytest

from twellctl.bundle.twell_cubin import sections
from twellctl.bundle.twell_nvrtc import Cubin, KernelError, Nvrtc, nvrtc_paths
from twellctl.here.resources import kernel_files

SOURCES = kernel_files()
# of .nv.info: attributes that have their size with them; launch bounds, and blocks of a cluster
_SIZED, _MAX_THREADS, _CLUSTER = 4, 0x05, 0x3D


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
    library = nvrtc(major)
    made = Path(os.environ["TWELL_TEST_BUILDS"]) / f"{Path(name).stem}-{arch}-{major}"
    with made.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # whoever comes second waits, and reads
        file.seek(0)
        if kept := file.read():
            return pickle.loads(kept)
        cubin = library.compile(name, SOURCES, arch)
        file.write(pickle.dumps(cubin))
    return cubin


def most_threads(code: bytes, entry: str) -> int:
    """The launch bounds of a kernel of a cubin, as ptxas keeps them."""
    return math.prod(_attributes(code, entry)[_MAX_THREADS])


def cluster_blocks(code: bytes, entry: str) -> int:
    """How many blocks a cluster of a kernel has."""
    return math.prod(_attributes(code, entry).get(_CLUSTER, (1,)))


def _attributes(code: bytes, entry: str) -> dict[int, tuple[int, ...]]:
    info, at, found = sections(code)[f".nv.info.{entry}"].content, 0, {}
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        sized = size if form == _SIZED else 0
        if attribute in (_MAX_THREADS, _CLUSTER):
            found[attribute] = struct.unpack_from(f"<{sized // 4}I", info, at + 4)
        at += 4 + sized
    return found
