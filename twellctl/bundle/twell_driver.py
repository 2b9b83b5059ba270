"""What CuPy does not offer: kernels that start before the one in front has ended; clusters."""

import ctypes
import functools
from collections.abc import Sequence

import numpy as np

from .twell_nvrtc import KernelError

_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6  # CU_LAUNCH_ATTRIBUTE_...
_C_TYPES = {np.int32: ctypes.c_int32, np.int64: ctypes.c_int64, np.float32: ctypes.c_float}


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, and 64 bytes, of which ours use the first ints."""

    _fields_ = [
        ("id", ctypes.c_int),
        ("padding", ctypes.c_char * 4),
        ("value", ctypes.c_int * 16),
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

    Of `args` an int is a pointer, NumPy scalars and tensor maps are what they are. The function's
    context must be current. Raises `KernelError` if the driver refuses.
    """
    values = [_value(arg) for arg in args]
    addresses = [ctypes.addressof(value) for value in values]
    attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, value=(1,))
    config = _config(grid, block, smem_bytes, stream, attribute)
    status = _launch_kernel()(
        ctypes.byref(config),
        ctypes.c_void_p(function),
        (ctypes.c_void_p * len(addresses))(*addresses),
        None,
    )
    if status:
        raise KernelError(f"cuLaunchKernelEx answers {status} for a grid of {tuple(grid)}")


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


def _value(arg: object) -> ctypes._SimpleCData | ctypes.Array:
    if isinstance(arg, int):
        return ctypes.c_void_p(arg)
    if isinstance(arg, np.void):
        return (ctypes.c_char * arg.nbytes).from_buffer_copy(arg.tobytes())
    return _C_TYPES[type(arg)](arg.item())


@functools.cache
def _launch_kernel():
    return ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx


@functools.cache
def _max_active_clusters():
    return ctypes.CDLL("libcuda.so.1").cuOccupancyMaxActiveClusters
