"""CUDA sources to cubins, by NVRTC at run time: found, called, and its results kept on disk.

Sources and headers come as bytes in memory, since in an export they lie wherever transformers found
them; no file and no CUDA header is included. NVRTC is called directly (it needs neither CuPy nor a
GPU), so that it is the one whose CUDA major is torch's: two of them may be installed side by side.

    source, its headers, options, NVRTC -> sha256 -> TWELL_CACHE_DIR/<sha256>.cubin

A cache that is damaged or cannot be written costs time, never a run.
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from .twell_cache import keep, kept
from .twell_spec import SPEC, spec

PACKAGES = {  # what to install beside torch, by its CUDA
    "12": "'cupy-cuda12x>=14,<15' nvidia-cuda-nvrtc-cu12",
    "13": "'cupy-cuda13x>=14,<15' 'nvidia-cuda-nvrtc>=13,<14'",
}
OPTIONS = ("--std=c++17", "-default-device", "--ptxas-options=-v")
_DIGEST_BYTES = hashlib.sha256().digest_size
# of a cubin, an ELF file of 64 bits, little end first
_HEADER = struct.Struct("<40xQ10xHHH")  # where section headers lie, their size, how many, names'
_SECTION = struct.Struct("<II16xQQ24x")  # name, kind, where it lies, its size
_NO_BITS = 8  # a kind: a size, and nothing in the file
# From sm_90 on, shared memory of a block begins with so much that is the driver's. A device keeps
# it beside what a block may ask for, but sections count it in.
_DRIVERS, _DRIVERS_SECTION = 1024, ".nv.shared.reserved.0"
_INCLUDE = re.compile(rb'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


class KernelError(RuntimeError):
    """The kernels cannot be compiled or launched; the message is one sentence."""


@dataclass(frozen=True)
class Cubin:
    """Machine code of one source for one architecture, and what ptxas said about it."""

    code: bytes
    log: str


def with_headers(name: str, sources: Mapping[str, bytes]) -> dict[str, bytes]:
    """`sources[name]` and what of `sources` it includes, directly or through another header."""
    found, open_files = {}, [name]
    while open_files:
        file = open_files.pop()
        if file in sources and file not in found:
            found[file] = sources[file]
            open_files += [header.decode() for header in _INCLUDE.findall(sources[file])]
    return found


def compiled_files(name: str, sources: Mapping[str, bytes], arch: str) -> dict[str, bytes]:
    """What is read when `sources[name]` is compiled for `arch`: it, its headers and its spec."""
    files = with_headers(name, sources)
    return files | {SPEC: spec(name, files, arch)}


class Nvrtc:
    """One NVRTC library."""

    def __init__(self, path: str):
        if os.path.isabs(path):
            for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")):
                ctypes.CDLL(str(builtins))  # NVRTC asks for it by bare name: here it is already
        self._library = ctypes.CDLL(path)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.path, self.version = path, (major.value, minor.value)

    def compile(self, name: str, sources: Mapping[str, bytes], arch: str) -> Cubin:
        """Compile `sources[name]` for `arch` ("sm_90a"); it may include others of `sources`.

        `KernelError` holds the compiler's first error.
        """
        headers = compiled_files(name, sources, arch)
        del headers[name]
        strings = ctypes.c_char_p * len(headers)
        program = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            sources[name],
            name.encode(),
            len(headers),
            strings(*headers.values()),
            strings(*(key.encode() for key in headers)),
        )
        try:
            options = [option.encode() for option in (*OPTIONS, f"-arch={arch}")]
            self._call(
                "nvrtcCompileProgram",
                program,
                len(options),
                (ctypes.c_char_p * len(options))(*options),
            )
            return Cubin(self._read("CUBIN", program), self._log(program))
        except KernelError as error:
            version = ".".join(map(str, self.version))
            lines = (line.strip() for line in self._log(program).splitlines())
            said = next((line for line in lines if "error" in line.lower()), "") or str(error)
            message = f"NVRTC {version} does not compile {name} for {arch}: {said}"
            raise KernelError(message) from error
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _log(self, program: ctypes.c_void_p) -> str:
        return self._read("ProgramLog", program).rstrip(b"\0").decode(errors="replace")

    def _read(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def _call(self, function: str, *args) -> None:
        if status := getattr(self._library, function)(*args):
            said = self._library.nvrtcGetErrorString(status).decode()
            raise KernelError(f"{function}: {said}")


def nvrtc_paths() -> Iterator[str]:
    """Where NVRTC may lie, best first: CUDA's major as torch's, then the newest."""
    ours = (torch.version.cuda or "").split(".")[0]
    majors = sorted(("13", "12"), key=lambda major: major != ours)
    spec = importlib.util.find_spec("nvidia")
    wheels = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    variables = ("CUDA_PATH", "CUDA_HOME", "CONDA_PREFIX")
    roots = [Path(os.environ[name]) for name in variables if os.environ.get(name)]
    for major in majors:
        file = f"libnvrtc.so.{major}"
        for folder in wheels:
            yield from map(str, sorted(folder.glob(f"*/lib/{file}")))
        yield file  # where the loader looks
        for root in (*roots, Path("/usr/local/cuda"), Path(f"/usr/local/cuda-{major}")):
            yield from (str(path) for path in (root / "lib64" / file, root / "lib" / file))


@functools.cache
def find_nvrtc() -> Nvrtc | None:
    """The NVRTC to compile with; None if there is none."""
    for path in nvrtc_paths():
        try:
            return Nvrtc(path)
        except (OSError, AttributeError, KernelError):
            continue
    return None


def what_is_missing() -> str | None:
    """None if the kernels' libraries are here, else one sentence that says what to install."""
    cuda = (torch.version.cuda or "13").split(".")[0]
    advice = f"pip install {PACKAGES.get(cuda, PACKAGES['13'])}"  # twellctl need not be here
    try:
        import cupy  # noqa: F401
    except Exception as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == "cupy"
        what = "is not installed" if absent else f"cannot be imported ({_line(error)})"
        return f"CuPy, which launches the kernels, {what}: {advice}"
    if find_nvrtc() is None:
        return f"NVRTC, which compiles the kernels, is not installed: {advice}"
    return None


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# ---- cache ----


def load_cubin(name: str, sources: Mapping[str, bytes], arch: str) -> Cubin:
    """`sources[name]` as a cubin for `arch`: from the cache, else compiled, then kept there.

    `KernelError` if there is no NVRTC, or if it does not compile the source.
    """
    nvrtc = find_nvrtc()
    if nvrtc is None:
        raise KernelError(
            what_is_missing() or "NVRTC, which compiles the kernels, is not installed"
        )
    file = f"{_key(name, sources, arch, nvrtc.version)}.cubin"
    cubin = _read(kept(file))
    if cubin is None:
        cubin = nvrtc.compile(name, sources, arch)
        log = cubin.log.encode()
        content = len(log).to_bytes(8, "little") + log + cubin.code
        keep(file, hashlib.sha256(content).digest() + content)
    return cubin


def _key(name: str, sources: Mapping[str, bytes], arch: str, version: tuple[int, int]) -> str:
    parts = [repr((version, arch, OPTIONS, name)).encode()]
    for key, text in sorted(compiled_files(name, sources, arch).items()):
        parts += [key.encode(), text]
    return digest_of(parts)


def digest_of(parts: Iterable[bytes]) -> str:
    """sha256 of `parts`, which no others have, however they are cut."""
    joined = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hashlib.sha256(joined).hexdigest()


def _read(content: bytes | None) -> Cubin | None:
    """What a file of the cache holds; None if it is not there or damaged."""
    digest, content = (content or b"")[:_DIGEST_BYTES], (content or b"")[_DIGEST_BYTES:]
    if hashlib.sha256(content).digest() != digest:
        return None
    log_end = 8 + int.from_bytes(content[:8], "little")
    return Cubin(content[log_end:], content[8:log_end].decode(errors="replace"))


# ---- what a cubin tells of its kernels ----


@dataclass(frozen=True)
class Section:
    """A part of a cubin. `content` is empty where the file has none."""

    size: int
    content: bytes


def sections(code: bytes) -> dict[str, Section]:
    """The sections of a cubin by name. `KernelError` if it is none."""
    try:
        return _read_sections(code)
    except (struct.error, IndexError, ValueError) as error:
        raise KernelError(f"what the compiler made is no cubin ({error})") from error


def _read_sections(code: bytes) -> dict[str, Section]:
    if code[:6] != b"\x7fELF\2\1":
        raise ValueError("not an ELF file of 64 bits")
    start, size, count, of_names = _HEADER.unpack_from(code)
    found = [_SECTION.unpack_from(code, start + i * size) for i in range(count)]
    names = found[of_names][2]
    return {
        code[names + name : code.index(b"\0", names + name)].decode(): Section(
            length, b"" if kind == _NO_BITS else code[at : at + length]
        )
        for name, kind, at, length in found
    }


def static_shared(code: bytes) -> dict[str, int]:
    """Bytes of shared memory that each kernel of a cubin declares, by entry."""
    found = sections(code)
    drivers = _DRIVERS if _DRIVERS_SECTION in found else 0
    entries = [name.removeprefix(".text.") for name in found if name.startswith(".text.")]
    shared = {entry: found.get(f".nv.shared.{entry}") for entry in entries}
    return {name: part.size - drivers if part else 0 for name, part in shared.items()}
