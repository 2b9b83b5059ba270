"""What CuPy does not offer: kernels that start before the one in front has ended; clusters.

All kernels are launched here, so that there is one way, whether they overlap or not.
"""

import ctypes
import functools
import itertools
import struct
import threading
from collections.abc import Sequence
from types import NoneType

import numpy as np
import torch
from torch import Tensor

from .twell_nvrtc import KernelError

_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
# CU_LAUNCH_ATTRIBUTE_...
_COOPERATIVE, _CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 2, 4, 6
# how an argument of each type lies in its place
_PLACES = {
    Tensor: "Q",
    NoneType: "Q",
    int: "i4x",
    float: "f4x",
    np.int64: "q",
    np.void: "128s",  # a tensor map
}
_MOST_BYTES = 4096  # of the arguments of a kernel


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, and 64 bytes, of which ours use the first ints."""

    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_char * 4), ("value", ctypes.c_int * 16)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


_PACK_CONFIG = struct.Struct("@7I P P I").pack_into  # the same, in one go


class _Frame(threading.local):
    """What a launch points to. The driver has read it when a launch returns."""

    def __init__(self):
        self.config, self.values = _Config(), ctypes.create_string_buffer(_MOST_BYTES)
        self.early = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, value=(1,))
        self.together = _Attribute(_COOPERATIVE, value=(1,))
        kept = self.config, self.early, self.together
        self.config_at, self.early_at, self.together_at = map(ctypes.addressof, kept)
        self.pointers: dict[tuple, ctypes.Array] = {}


_frame = _Frame()


def start(
    function: int,
    grid: Sequence[int],
    block: int,
    args: tuple[object, ...],
    smem_bytes: int,
    stream: int,
    *,
    overlap: bool = False,
    together: bool = False,
) -> None:
    """Launch CUfunction `function`; with `overlap` it may start before the kernel in front ends,
    or else with `together` all its blocks run at the same time.

    Of `args` tensors are pointers, None is a null pointer, int and float have 32 bits, np.int64 and
    tensor maps are what they are. The function's device must be the current one. Raises
    `KernelError` if the driver refuses.
    """
    frame, kinds = _frame, tuple(map(type, args))
    layout, tensors, others = _layout(kinds)
    values = list(args)
    for i in tensors:
        values[i] = values[i].data_ptr()
    for i in others:
        values[i] = 0 if values[i] is None else values[i].tobytes()
    layout.pack_into(frame.values, 0, *values)
    pointers = frame.pointers.get(kinds)
    if pointers is None:
        base = ctypes.addressof(frame.values)
        places = [base + offset for offset in _offsets(kinds)]
        pointers = frame.pointers[kinds] = (ctypes.c_void_p * len(places))(*places)
    size = (*grid, *(1,) * (3 - len(grid)), block, 1, 1, smem_bytes)
    attribute = frame.early_at if overlap else frame.together_at if together else 0
    _PACK_CONFIG(frame.config, 0, *size, stream, attribute, int(attribute > 0))
    given = frame.config_at, function, ctypes.addressof(pointers), None
    status = _launch_kernel()(*given)
    if status == _NO_CONTEXT:  # a thread that has not asked CUDA for anything yet, as autograd's
        torch.cuda.mem_get_info()
        status = _launch_kernel()(*given)
    if status:
        raise KernelError(f"cuLaunchKernelEx answers {status} for a grid of {tuple(grid)}")


@functools.cache
def _layout(kinds: tuple[type, ...]) -> tuple[struct.Struct, tuple[int, ...], tuple[int, ...]]:
    """(places of arguments of these types, which of them are tensors, None or tensor maps)."""
    tensors = (i for i, kind in enumerate(kinds) if issubclass(kind, Tensor))
    others = (i for i, kind in enumerate(kinds) if kind in (NoneType, np.void))
    return struct.Struct("=" + "".join(map(_place, kinds))), tuple(tensors), tuple(others)


def _offsets(kinds: tuple[type, ...]) -> list[int]:
    sizes = [struct.calcsize("=" + _place(kind)) for kind in kinds]
    return [0, *itertools.accumulate(sizes[:-1])]


def _place(kind: type) -> str:
    return _PLACES[Tensor if issubclass(kind, Tensor) else kind]


def clusters_at_once(function: int, cluster: int, block: int, smem_bytes: int) -> int:
    """How many clusters of `cluster` blocks of CUfunction `function` run at the same time.

    The function's context must be current. Raises `KernelError` if the driver does not say.
    """
    attribute = _Attribute(_CLUSTER_DIMENSION, value=(cluster, 1, 1))
    config, num = _config((cluster,), block, smem_bytes, 0, attribute), ctypes.c_int()
    status = _max_active_clusters()(
        ctypes.byref(num), ctypes.c_void_p(function), ctypes.byref(config)
    )
    if status:
        raise KernelError(f"cuOccupancyMaxActiveClusters answers {status} for {cluster} blocks")
    return num.value


def _config(
    grid: Sequence[int], block: int, smem_bytes: int, stream: int, attribute: _Attribute
) -> _Config:
    return _Config(
        (ctypes.c_uint * 3)(*grid, *(1,) * (3 - len(grid))),
        (ctypes.c_uint * 3)(block, 1, 1),
        smem_bytes,
        stream,
        ctypes.pointer(attribute),
        1,
    )


@functools.cache
def _launch_kernel():
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    function.argtypes = (ctypes.c_void_p,) * 4
    return function


@functools.cache
def _max_active_clusters():
    return ctypes.CDLL("libcuda.so.1").cuOccupancyMaxActiveClusters
