"""The kernels on a CPU: their sources as they are, by g++ over emulator/ptx instead of kernels/ptx.

emulator/judge.h says what is judged.
"""

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from twellctl.bundle.twell_nvrtc import compiled_files, with_headers
from twellctl.bundle.twell_signatures import signature_of
from twellctl.bundle.twell_spec import ENTRY_FILES, SPEC
from twellctl.here.resources import kernel_files

EMULATOR = Path(__file__).parent / "emulator"
FLAGS = ["-std=c++17", "-fPIC", "-w"]
OF_GPU = ["-O3", "-march=native", "-ffp-contract=off"]
OF_GPU += ["-fno-semantic-interposition"]  # else no function of it is inlined
OF_SOURCE = ["-O1", "-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0"]
OF_SOURCE += ["-fno-extern-tls-init"]
MOST_WORDS, MOST_NUMBERS = 26, 4  # of a launch: as emulator/gpu.cpp
needs_emulator = pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64",
    reason="the emulator needs g++ on x86-64",
)


class Wrong(AssertionError):
    """What the emulator found."""


class EmulatedKernels:
    """As a `KernelSet`, for tensors on the CPU; of `sources`, else those there are."""

    def __init__(self, sources: Mapping[str, bytes] | None = None):
        self.sources = sources or kernel_files()

    def launch(
        self,
        name: str,
        grid: tuple[int, ...],
        block: int,
        args: Mapping[str, object],
        smem_bytes: int = 0,
        *,
        cluster: int = 1,
        at_once: int | None = None,
        seed: int = 1,
        beside: Iterable[Tensor] = (),
        from_previous: Iterable[Tensor] = (),
    ) -> None:
        """Run entry `name` to its end, `at_once` blocks at the same time (a cluster, if not told).

        `args` as a `KernelSet` takes them.
        `beside`: memory that it reads by pointers in memory. `from_previous`: what the kernel in
        front writes, which may still run, of these tensors or parts of them. Raises `Wrong`.
        """
        library = _library(self.sources, name)
        columns, rows = (*grid, 1)[:2]
        words, numbers = (ctypes.c_uint64 * MOST_WORDS)(), (ctypes.c_float * MOST_NUMBERS)()
        signature = signature_of(name, with_headers(ENTRY_FILES[name], self.sources).values())
        signature.pack_into(bytearray(signature.layout.size), args)  # are they what it takes?
        pairs = [*zip(signature.types, (args[name] for name in signature.names), strict=True)]
        floats = [arg for kind, arg in pairs if kind == "float"]
        whole = [_word(arg) for kind, arg in pairs if kind != "float"]
        words[: len(whole)], numbers[: len(floats)] = whole, floats
        of_previous = [(tensor.data_ptr(), _reach(tensor), True) for tensor in from_previous]
        given = (arg for arg in (*args.values(), *beside) if isinstance(arg, Tensor))
        others = ((tensor.data_ptr(), _reach(tensor), False) for tensor in given)
        memory = [number for place in (*of_previous, *others) for number in place]
        given = (ctypes.c_uint64 * len(memory))(*memory)
        entry = ctypes.cast(library[name], ctypes.c_void_p)
        wrong = library.launch(
            *(entry, words, numbers, columns, rows, block, smem_bytes, cluster),
            *(at_once or cluster, seed, given, len(memory) // 3),
        )
        if wrong:
            raise Wrong(f"{name}: {wrong.decode()}")


def _reach(tensor: Tensor) -> int:
    """Bytes from its first number to the end of its last."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.itemsize * (1 + sum((size - 1) * stride for size, stride in steps))


def _word(arg: Tensor | int | np.integer | None) -> int:
    if arg is None or isinstance(arg, Tensor):
        return 0 if arg is None else arg.data_ptr()
    return int(arg) % 2**64


def _library(sources: Mapping[str, bytes], entry: str) -> ctypes.CDLL:
    source = ENTRY_FILES[entry]
    files = compiled_files(source, sources, "sm_90a")
    others = rf" make\((?!{entry},)[^)]*\)"
    files[SPEC] = re.sub(others.encode(), b"", files[SPEC])
    return _loaded(source, tuple(sorted(files.items())))


@functools.cache
def _loaded(source: str, files: tuple[tuple[str, bytes], ...]) -> ctypes.CDLL:
    own, folder = list(EMULATOR.rglob("*.*")), _include_folder(files)
    include = ["-I", str(EMULATOR)]
    gpu = _made([*FLAGS, *OF_GPU, *include, "-c", str(EMULATOR / "gpu.cpp")], own)
    include += ["-I", str(folder), "-x", "c++", "-include", str(EMULATOR / "gpu.h")]
    kernel = _made([*FLAGS, *OF_SOURCE, *include, "-c", str(folder / source)], own)
    linked = _made(["-shared", "-Wl,-Bsymbolic", str(kernel), str(gpu)], [kernel, gpu])
    library = ctypes.CDLL(str(linked))
    library.launch.restype = ctypes.c_char_p
    return library


def _include_folder(files: tuple[tuple[str, bytes], ...]) -> Path:
    """A source with its headers and its spec, for g++; a folder that is named by what they are."""
    folder = _builds() / hashlib.sha256(repr(files).encode()).hexdigest()
    with _locked(folder):
        if not folder.exists():
            for name, text in files:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(text)
    return folder


def _made(command: list[str], paths: Iterable[Path]) -> Path:
    """What g++ makes by `command` out of `paths`, once for all processes of a session."""
    key = hashlib.sha256("\n".join(command).encode())
    for path in sorted(paths):
        key.update(path.read_bytes())
    made = _builds() / f"{key.hexdigest()}.o"
    with _locked(made):
        if not made.exists():
            subprocess.run(["g++", *command, "-o", str(made)], check=True)
    return made


def _builds() -> Path:
    return Path(os.environ["TWELL_TEST_BUILDS"])


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # whoever comes second waits
        yield
