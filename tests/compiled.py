"""The kernels as NVRTC compiles them: each file once a session for each architecture and NVRTC.

The processes of a session share what they compile through a folder, which conftest.py makes.
Without TWELL_TEST_EVERY_CASE a file that is compiled whole for another NVRTC or architecture, to
the same sizes, is compiled with its first entry alone; for NVRTC 12, and where it differs from
another file in numbers, in a hurry: all errors are found, but its registers are not those of a
release. Products of few tokens, whose sizes depend on the architecture, are compiled whole for
Hopper alone. Tests on a GPU run what `compiled_whole` compiles.
"""

import fcntl
import functools
import hashlib
import math
import os
import pickle
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from unittest import mock

import pytest

from twellctl.bundle import twell_nvrtc, twell_spec
from twellctl.bundle.twell_nvrtc import Cubin
from twellctl.bundle.twell_spec import HEAD_DIMS, MOST_OF_BLOCK, STEP_KINDS, entry
from twellctl.here.resources import kernel_files

SOURCES = kernel_files()
EVERY_CASE = "TWELL_TEST_EVERY_CASE" in os.environ  # also what is like another, or takes long
HURRIED, HURRIED_BYTES = "--Ofast-compile=max", 1024  # of shared memory, that it adds
# the text of the steps of 4096, of heads of 128, or of products in bf16, with other numbers
OTHERS_TEXT = {
    f"{entry(f'decode/step_{K}', kind)}.cu" for K in MOST_OF_BLOCK for kind in STEP_KINDS
}
OTHERS_TEXT -= {"decode/step_4096.cu", "decode/step_1536_e4m3.cu", "decode/step_4096_int4.cu"}
OTHERS_TEXT |= {f"decode/attend_{D}.cu" for D in HEAD_DIMS if D != 128}
OTHERS_TEXT |= {
    f"{entry(name, 'e4m3')}.cu" for name in ("ffn/few_linear", "ffn/few_hidden", "ffn/few_down")
}
OTHERS_TEXT |= {f"{entry(name, 'e4m3')}.cu" for name in ("ffn/few_walk", "decode/few_gated")}
# of .nv.info: attributes that have their size with them; launch bounds, a parameter, blocks of a
# cluster
_SIZED, _MAX_THREADS, _PARAMETER, _CLUSTER = 4, 0x05, 0x17, 0x3D


@functools.cache
def nvrtc(major: int) -> twell_nvrtc.Nvrtc:
    """The NVRTC of a CUDA version; skips the test if it is not here."""
    for path in twell_nvrtc.nvrtc_paths():
        if path.endswith(f".{major}"):
            try:
                return twell_nvrtc.Nvrtc(path)
            except (OSError, twell_nvrtc.KernelError):
                continue
    pytest.skip(f"no NVRTC of CUDA {major}: pip install 'twellctl[test]' on Linux")


@functools.cache
def compiled(name: str, arch: str, major: int = 13) -> Cubin:
    """The cubin of a source with `entries_for`; skips the test without that NVRTC."""
    library, entries = nvrtc(major), entries_for(name, arch, major)
    options = (*twell_nvrtc.OPTIONS, *([HURRIED] if is_hurried(name, arch, major) else []))
    files = sorted(twell_nvrtc.compiled_files(name, SOURCES, arch).items())
    read = repr((name, files, library.version, arch, options, entries))

    def make() -> Cubin:
        with (
            mock.patch.dict(twell_spec.SOURCES, {name: entries}),
            mock.patch.object(twell_nvrtc, "OPTIONS", options),
        ):
            return library.compile(name, SOURCES, arch)

    return _made_once(hashlib.sha256(read.encode()).hexdigest(), make)


def compiled_whole(name: str, sources: Mapping[str, bytes], arch: str) -> Cubin:
    """As `twell_nvrtc.load_cubin`, out of TWELL_TEST_BUILDS in place of the user's cache.

    A build is found again by what the product looks at: the version of NVRTC, the architecture,
    the options and all text that is read. Versions of Python and of torch do not count.
    """
    library = twell_nvrtc.find_nvrtc()
    if library is None:
        raise twell_nvrtc.KernelError(twell_nvrtc.what_is_missing() or "NVRTC is not installed")
    key = twell_nvrtc._key(name, sources, arch, library.version)
    return _made_once(key, lambda: library.compile(name, sources, arch))


def _made_once(key: str, make: Callable[[], Cubin]) -> Cubin:
    """What a process that shares TWELL_TEST_BUILDS has made under `key`, else what `make` makes."""
    with (Path(os.environ["TWELL_TEST_BUILDS"]) / key).open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # whoever comes second waits, and reads
        file.seek(0)
        if kept := file.read():
            return pickle.loads(kept)
        cubin = make()
        file.write(pickle.dumps(cubin))
    return cubin


def is_hurried(name: str, arch: str, major: int) -> bool:
    return not EVERY_CASE and (major < 13 or arch != "sm_90a" or name in OTHERS_TEXT)


def static_bytes(name: str, arch: str, major: int = 13) -> dict[str, int]:
    """Shared memory that each kernel of a source declares."""
    more = HURRIED_BYTES if is_hurried(name, arch, major) else 0
    found = twell_nvrtc.static_shared(compiled(name, arch, major).code)
    found = {entry: found[entry] for entry in found if entry in twell_spec.ENTRY_FILES}
    return {entry: size - (more if size >= more else 0) for entry, size in found.items()}


def entries_for(name: str, arch: str, major: int) -> Mapping[str, tuple] | Iterable[str]:
    """The entries that a source is compiled with: all, the first, or those of popular models."""
    entries = twell_spec.entries_of(name, _capability(arch))
    if not entries or EVERY_CASE:
        return entries or twell_spec.SOURCES[name]
    if major < 13 or (arch != "sm_90a" and specified_alike(name, arch, "sm_90a")):
        return dict([next(iter(entries.items()))])
    if name.startswith("decode/step_"):  # models have heads of 128, some of 64 or 256
        wanted = {128, 64 if "_2048" in name else 256}
        return {entry: given for entry, given in entries.items() if given[0] in wanted}
    return entries


@functools.cache
def specified_alike(name: str, one: str, other: str) -> bool:
    """Whether a source is built for the same sizes on two architectures; its instructions, which
    ptx/ chooses by architecture, may be others."""
    files, others = (twell_nvrtc.compiled_files(name, SOURCES, arch) for arch in (one, other))
    chosen = [file for file, text in files.items() if b"__CUDA_ARCH__" in text]
    return files == others and all(file.startswith("ptx/") for file in chosen)


def _capability(arch: str) -> tuple[int, int]:
    return divmod(int(arch.removeprefix("sm_").rstrip("af")), 10)


def parameter_bytes(code: bytes, entry: str) -> list[int]:
    """How many bytes each parameter of a kernel of a cubin takes, in their order."""
    found = {}
    for attribute, content in _attributes(code, entry):
        if attribute == _PARAMETER:
            _, place, _, packed = struct.unpack("<IHHI", content)
            found[place] = packed >> 18
    return [found[place] for place in range(len(found))]


def most_threads(code: bytes, entry: str) -> int:
    """The launch bounds of a kernel of a cubin, as ptxas keeps them."""
    return _product_of(code, entry, _MAX_THREADS)


def cluster_blocks(code: bytes, entry: str) -> int:
    """How many blocks a cluster of a kernel has."""
    return _product_of(code, entry, _CLUSTER)


def compile_claims(file: str, claims: list[str], arch: str, major: int = 13) -> None:
    """`file` without its entries; KernelError for the first of `claims` that does not hold."""
    asserted = "".join(f"static_assert({claim});\n" for claim in claims)
    text = f'#include "{file}"\n{asserted}'.encode()
    nvrtc(major).compile("claims.cu", SOURCES | {"claims.cu": text}, arch)


def _product_of(code: bytes, entry: str, wanted: int) -> int:
    for attribute, content in _attributes(code, entry):
        if attribute == wanted:
            return math.prod(struct.unpack(f"<{len(content) // 4}I", content))
    return 1


def _attributes(code: bytes, entry: str) -> Iterator[tuple[int, bytes]]:
    info, at = twell_nvrtc.sections(code)[f".nv.info.{entry}"].content, 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        sized = size if form == _SIZED else 0
        yield attribute, info[at + 4 : at + 4 + sized]
        at += 4 + sized
