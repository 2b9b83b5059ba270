"""Kernels of an export, loaded by CuPy, launched on torch's tensors and torch's current stream.

A source is known by its path in kernels/, a kernel by its entry: entry `down` lies in ffn/down.cu.
Modules are loaded once for each (sources, device), at first use; nothing else here outlives a call,
so threads, models and devices do not meet. CuPy has no clusters, and no kernels that start before
the one in front has ended: `start` launches all, whether they overlap or not.
"""

import ctypes
import functools
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .twell_nvrtc import (
    Cubin,
    KernelError,
    digest_of,
    load_cubin,
    static_shared,
    what_is_missing,
    with_headers,
)
from .twell_plan import Limits
from .twell_signatures import Signature, signature_of
from .twell_spec import ENTRY_FILES

_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
# CU_LAUNCH_ATTRIBUTE_...
_COOPERATIVE, _CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 2, 4, 6
_MOST_BYTES = 4096  # of the arguments of a kernel


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, and 64 bytes, of which ours use the first ints."""

    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_char * 4), ("value", ctypes.c_int * 16)]


# CUlaunchConfig: grid and block, bytes of shared memory, stream, attributes and how many
_CONFIG = struct.Struct("@7I P P I 4x")


class _Frame(threading.local):
    """What a launch points to. The driver has read it when a launch returns."""

    def __init__(self):
        self.config = ctypes.create_string_buffer(_CONFIG.size)
        self.values = ctypes.create_string_buffer(_MOST_BYTES)
        self.early = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, value=(1,))
        self.together = _Attribute(_COOPERATIVE, value=(1,))
        kept = self.config, self.early, self.together
        self.config_at, self.early_at, self.together_at = map(ctypes.addressof, kept)
        self.pointers: dict[Signature, ctypes.Array] = {}  # to each argument


_frame = _Frame()


def start(
    function: int,
    grid: Sequence[int],
    block: int,
    signature: Signature,
    args: Mapping[str, object],
    smem_bytes: int,
    stream: int,
    *,
    overlap: bool = False,
    together: bool = False,
) -> None:
    """Launch CUfunction `function`; with `overlap` it may start before the kernel in front ends,
    or else with `together` all its blocks run at the same time.

    `args` are those of its `signature`. The function's device must be the current one. Raises
    `KernelError` if the driver refuses.
    """
    frame = _frame
    signature.pack_into(frame.values, args)
    pointers = frame.pointers.get(signature)
    if pointers is None:
        base, num = ctypes.addressof(frame.values), len(signature.offsets)
        places = (base + offset for offset in signature.offsets)
        pointers = frame.pointers[signature] = (ctypes.c_void_p * num)(*places)
    size = (*grid, *(1,) * (3 - len(grid)), block, 1, 1, smem_bytes)
    attribute = frame.early_at if overlap else frame.together_at if together else 0
    _CONFIG.pack_into(frame.config, 0, *size, stream, attribute, int(attribute > 0))
    given = frame.config_at, function, ctypes.addressof(pointers), None
    status = _launch_kernel()(*given)
    if status == _NO_CONTEXT:  # a thread that has not asked CUDA for anything yet, as autograd's
        torch.cuda.mem_get_info()
        status = _launch_kernel()(*given)
    if status:
        raise KernelError(f"cuLaunchKernelEx answers {status} for a grid of {tuple(grid)}")


def clusters_at_once(function: int, cluster: int, block: int, smem_bytes: int) -> int:
    """How many clusters of `cluster` blocks of CUfunction `function` run at the same time.

    The function's context must be current. Raises `KernelError` if the driver does not say.
    """
    attribute = _Attribute(_CLUSTER_DIMENSION, value=(cluster, 1, 1))
    size, at = (cluster, 1, 1, block, 1, 1, smem_bytes), ctypes.addressof(attribute)
    config, num = ctypes.create_string_buffer(_CONFIG.size), ctypes.c_int()
    _CONFIG.pack_into(config, 0, *size, 0, at, 1)
    status = _max_active_clusters()(
        ctypes.byref(num), ctypes.c_void_p(function), ctypes.byref(config)
    )
    if status:
        raise KernelError(f"cuOccupancyMaxActiveClusters answers {status} for {cluster} blocks")
    return num.value


@functools.cache
def _launch_kernel():
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    function.argtypes = (ctypes.c_void_p,) * 4
    return function


@functools.cache
def _max_active_clusters():
    return ctypes.CDLL("libcuda.so.1").cuOccupancyMaxActiveClusters


TENSOR_MAP = np.dtype([("opaque", np.uint64, (16,))])
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_UNASKED_SHARED = 48 * 1024  # what a block has without permission, static and dynamic together
_SWIZZLE_128B, _L2_256B = 3, 3  # of cuTensorMapEncodeTiled
_MAP_BFLOAT16 = 9
_BOX_BYTES, _BF16_BYTES = 128, 2  # of a row; of an element


class LoadError(KernelError):
    """The driver did not load compiled kernels; it may another time (out of memory, a capture)."""


_sources: dict[str, dict[str, bytes]] = {}
_kernel_sets: dict[tuple[str, int], "KernelSet"] = {}
_lock = threading.Lock()


@functools.cache
def device_limits(index: int) -> Limits:
    """The limits of CUDA device `index`."""
    found = torch.cuda.get_device_properties(index)
    return Limits(
        found.multi_processor_count,
        found.shared_memory_per_multiprocessor - 1024,  # what the driver keeps of each block
        (found.major, found.minor),
    )


def register_sources(files: Mapping[str, bytes]) -> str:
    """Make `files` ({"ffn/pack.cu": text, "ptx/mma.cuh": text}) known; their digest names them."""
    digest = digest_of(part for name in sorted(files) for part in (name.encode(), files[name]))
    with _lock:
        _sources.setdefault(digest, dict(files))
    return digest


def kernels_for(sources: str, index: int) -> "KernelSet":
    """The kernels of registered sources on CUDA device `index`; nothing is compiled yet."""
    kernels = _kernel_sets.get((sources, index))
    if kernels is None:
        with _lock:
            if sources not in _sources:
                raise KernelError(f"no kernel sources are registered under {sources!r}")
            kernels = KernelSet(_sources[sources], index)
            kernels = _kernel_sets.setdefault((sources, index), kernels)
    return kernels


class KernelSet:
    """The kernels of one set of sources on one device."""

    def __init__(self, sources: Mapping[str, bytes], index: int):
        self._sources, self._index = sources, index
        self._functions: dict[str, Any] = {}
        self._signatures: dict[str, Signature] = {}
        self._modules: dict[str, Any] = {}
        self._static: dict[str, int] = {}  # shared memory that an entry declares
        self._shared: dict[str, int] = {}  # and may be given beside that
        self._clusters: dict[tuple[str, int, int, int], int] = {}
        self._lock = threading.Lock()
        self.logs: dict[str, str] = {}

    def prepare(self, names: Iterable[str]) -> None:
        """Compile and load entries. `KernelError` if one cannot be, `RuntimeError` in a capture."""
        if new := [name for name in names if name not in self._functions]:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("TwELL kernels load at first use: run once before the capture")
            with self._lock, torch.cuda.device(self._index):
                self._load([name for name in new if name not in self._functions])

    def clusters_at_once(self, name: str, cluster: int, block: int, smem_bytes: int) -> int:
        """How many clusters of `cluster` blocks of entry `name` run here at the same time."""
        asked = name, cluster, block, smem_bytes
        if (found := self._clusters.get(asked)) is None:
            self.prepare([name])
            with torch.cuda.device(self._index):
                function = self._functions[name]
                self._allow_shared(name, function, smem_bytes)
                found = clusters_at_once(function.ptr, cluster, block, smem_bytes)
            self._clusters[asked] = found
        return found

    def launch(
        self,
        name: str,
        grid: tuple[int, ...],
        block: int,
        args: Mapping[str, object],
        smem_bytes: int = 0,
        *,
        overlap: bool = False,
        together: bool = False,
    ) -> None:
        """Launch entry `name` on torch's current stream of this device.

        `args` are by the names of its parameters, as its source has them: tensors or None for
        pointers, tensor maps, and numbers. `overlap` lets the kernel start before the one in front
        of it has ended (kernels/ptx/pdl.cuh says what it may do then); `together`: its blocks
        wait for each other.
        """
        function = self._functions.get(name)
        if function is None:
            self.prepare([name])
            function = self._functions[name]
        given = name, function, grid, block, args, smem_bytes, overlap, together
        if torch._C._cuda_getDevice() == self._index:
            self._start(*given)
        else:
            with torch.cuda.device(self._index):
                self._start(*given)

    def _start(self, name, function, grid, block, args, smem_bytes, overlap, together) -> None:
        if smem_bytes > self._shared[name]:
            self._allow_shared(name, function, smem_bytes)
        early = overlap and device_limits(self._index).capability >= (9, 0)
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        start(
            function.ptr,
            grid,
            block,
            self._signatures[name],
            args,
            smem_bytes,
            stream,
            overlap=early,
            together=together,
        )

    def _allow_shared(self, name: str, function, smem_bytes: int) -> None:
        """Permission for all that there is: then no launch depends on those before it."""
        static, limit = self._static[name], device_limits(self._index).smem_bytes
        if static + smem_bytes > limit:
            asked = f"{name} asks for {static + smem_bytes} bytes of shared memory"
            raise KernelError(f"{asked}, and a block has {limit} on this GPU")
        _cupy()[1].funcSetAttribute(function.ptr, _MAX_DYNAMIC_SHARED, limit - static)
        self._shared[name] = limit - static

    def _load(self, names: list[str]) -> None:
        files = {name: ENTRY_FILES.get(name, f"{name}.cu") for name in names}
        for name, file in files.items():
            if file not in self._sources:
                raise KernelError(f"{file}, where kernel {name} should be, is not in this export")
        signatures = self._read_signatures(files)
        arch = device_limits(self._index).arch
        new = [file for file in dict.fromkeys(files.values()) if file not in self._modules]
        with ThreadPoolExecutor(max(1, len(new))) as pool:  # NVRTC compiles side by side
            cubins = pool.map(lambda file: load_cubin(file, self._sources, arch), new)
            for file, cubin in zip(new, cubins, strict=True):
                static = static_shared(cubin.code)
                self._modules[file] = self._module(file, arch, cubin)
                self._static |= static
        for name, file in files.items():
            self._signatures[name] = signatures[name]
            self._shared[name] = _UNASKED_SHARED - self._static[name]
            self._functions[name] = self._modules[file].get_function(name)

    def _read_signatures(self, files: Mapping[str, str]) -> dict[str, Signature]:
        """Of entries, by the files where they lie."""
        texts = {file: with_headers(file, self._sources).values() for file in {*files.values()}}
        try:
            return {name: signature_of(name, texts[file]) for name, file in files.items()}
        except ValueError as error:
            raise KernelError(str(error)) from error

    def _module(self, file: str, arch: str, cubin: Cubin):
        self.logs[file] = cubin.log
        module = _cupy()[0]()
        try:
            module.load(cubin.code)
        except Exception as error:  # of the driver: no code for this device, too new a CUDA
            raise LoadError(f"the driver does not load {file} for {arch}: {error}") from error
        return module


@functools.cache
def _cupy() -> tuple[type, ModuleType]:
    """CuPy's Module and its binding of the driver. `KernelError` says what is missing."""
    try:
        from cupy.cuda.function import Module
        from cupy_backends.cuda.api import driver
    except Exception as error:
        raise KernelError(what_is_missing() or f"CuPy is not as it was: {error}") from error
    return Module, driver


def tensor_map(tensor: Tensor, box_rows: int) -> np.void:
    """The TMA descriptor of `tensor` `[rows, columns]`, bf16, swizzled over 128 bytes.

    A load brings a box of `box_rows` (at most 256) times 128 bytes of each; outside of the tensor
    it reads zeros. Rows must begin at multiples of 16 bytes. Pass it by value, as a
    `const __grid_constant__` struct of 128 bytes aligned to 64.
    """
    if tensor.dtype != torch.bfloat16 or tensor.dim() != 2 or tensor.stride(1) != 1:
        raise ValueError("a tensor map takes bf16 [rows, columns] with contiguous rows")
    return _encode(tensor.data_ptr(), *tensor.shape, tensor.stride(0), box_rows)


@functools.lru_cache(maxsize=4096)  # a pure function: the descriptor holds just these numbers
def _encode(
    pointer: int,
    rows: int,
    columns: int,
    row_stride: int,
    box_rows: int,
) -> np.void:
    raw: np.ndarray = np.zeros(256, np.uint8)
    start = -raw.ctypes.data % 128
    status = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.c_void_p(raw.ctypes.data + start),
        _MAP_BFLOAT16,
        2,
        ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * 2)(columns, rows),
        (ctypes.c_uint64 * 1)(row_stride * _BF16_BYTES),
        (ctypes.c_uint32 * 2)(_BOX_BYTES // _BF16_BYTES, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        0,
        _SWIZZLE_128B,
        _L2_256B,
        0,
    )
    if status:
        raise KernelError(
            f"cuTensorMapEncodeTiled answers {status} for [{rows}, {columns}] "
            f"with rows of {row_stride} at {pointer:#x}, boxes of {box_rows} rows"
        )
    encoded: Any = raw[start : start + 128].view(TENSOR_MAP)
    return encoded[0]
