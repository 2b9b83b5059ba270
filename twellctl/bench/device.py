"""Where a bench runs, and all about it that a figure depends on."""

import contextlib
import gc
import math
import os
import platform
from collections.abc import Iterable
from typing import Any

import torch

from twellctl.bundle.twell_e4m3 import why_no_products
from twellctl.bundle.twell_nvrtc import find_nvrtc
from twellctl.errors import TwellError, UsageError
from twellctl.here.machine import CUPY_WHEELS, version_of
from twellctl.models.loading import gpu_memory
from twellctl.version import __version__

NVRTC_WHEELS = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "TWELL_ROUTE")
LIBRARIES = ("transformers", "triton", *CUPY_WHEELS, *NVRTC_WHEELS)


def bench_device(name: str | None) -> torch.device:
    """The device to measure on, made the current one: `name`, or the current CUDA device.

    Raises `TwellError` without CUDA: only `name` "cpu" runs there.
    """
    device = None
    with contextlib.suppress(RuntimeError):
        device = torch.device(name or "cuda")
    if device is None or device.type not in ("cuda", "cpu"):
        raise UsageError(f"device must be cuda, cuda:1 and so on, or cpu, got {name!r}")
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise TwellError(
            "bench measures on an NVIDIA GPU and torch finds none here (see twellctl doctor); "
            "--device cpu runs tiny shapes, to try the command"
        )
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device.index >= torch.cuda.device_count():
        raise UsageError(f"device must be one of {torch.cuda.device_count()} GPUs, got {name!r}")
    torch.cuda.set_device(device)
    return device


def device_facts(device: torch.device) -> dict[str, Any]:
    """Of the JSON: device, the order of the GPUs, and versions of what makes its code."""
    versions: dict[str, str | None] = {"twellctl": __version__}
    versions["python"] = platform.python_version()
    versions |= {"torch": torch.__version__, "torch_cuda": torch.version.cuda}
    versions |= {name: version for name in LIBRARIES if (version := version_of(name))}
    facts: dict[str, Any] = {"device": device_name(device), "versions": versions}
    facts["environment"] = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        count = torch.cuda.device_count()
        facts |= {
            "device_index": device.index,
            "gpus": [torch.cuda.get_device_name(index) for index in range(count)],
            "uuid": str(gpu.uuid),
            "compute_capability": f"{gpu.major}.{gpu.minor}",
            "sms": gpu.multi_processor_count,
            "l2_bytes": gpu.L2_cache_size,
            "memory_bytes": gpu.total_memory,
        }
        nvrtc = find_nvrtc()  # which compiles the kernels
        versions["nvrtc"] = ".".join(map(str, nvrtc.version)) if nvrtc else None
    return facts


def free_memory(device: torch.device) -> float:
    """Bytes that are free on a GPU, what torch keeps unused included; no bound on the CPU."""
    if device.type != "cuda":
        return math.inf
    gc.collect()
    return gpu_memory(device)[0]


def device_name(device: torch.device) -> str:
    """What to call the device in a sentence."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def why_no_fp8(device: torch.device, sizes: Iterable[tuple[int, int]]) -> str | None:
    """None if `device` has FP8 products of bf16 by weights of all `sizes` (N, K), else why not."""
    index = device.index if device.type == "cuda" else None
    reasons = (why_no_products(index, N, K, str(torch.bfloat16)) for N, K in sorted(sizes))
    return next((said for said in reasons if said), None)
