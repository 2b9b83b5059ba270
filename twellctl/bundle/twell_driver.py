"""Launches that CuPy does not offer: a kernel that starts before the one in front has ended."""

import ctypes
import functools
from collections.abc import Sequence

import numpy as np

from .twell_nvrtc import KernelError

_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_...
_C_TYPES = {np.int32: ctypes.c_int32, np.int64: ctypes.c_int64, np.float32: ctypes.c_float}


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, and 64 bytes of which ours uses the first int."""

    _fields_ = [
        ("id", ctypes.c_int),
        ("padding", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    ]


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


def start_overlapping(
    function: int,
    grid: Sequence[int],
    block: int,
    args: Sequence[object],
    smem_bytes: int,
    stream: int,
) -> None:
    """Launch CUfunction `function` so that it may start before the kernel in front has ended.

    Of `args` an int is a pointer, NumPy scalars are what they are. The function's context must be
    current. Raises `KernelError` if the driver refuses.
    """
    values = [_value(arg) for arg in args]
    addresses = [ctypes.addressof(value) for value in values]
    attribute = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
    config = _Config(
        (ctypes.c_uint * 3)(*grid, *(1,) * (3 - len(grid))),
        (ctypes.c_uint * 3)(block, 1, 1),
        smem_bytes,
        stream,
        ctypes.pointer(attribute),
        1,
    )
    status = _launch_kernel()(
        ctypes.byref(config),
        ctypes.c_void_p(function),
        (ctypes.c_void_p * len(addresses))(*addresses),
        None,
    )
    if status:
        raise KernelError(f"cuLaunchKernelEx answers {status} for a grid of {tuple(grid)}")


def _value(arg: object) -> ctypes._SimpleCData:
    if isinstance(arg, int):
        return ctypes.c_void_p(arg)
    return _C_TYPES[type(arg)](arg.item())


@functools.cache
def _launch_kernel():
    return ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
