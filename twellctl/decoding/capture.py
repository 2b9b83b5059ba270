"""CUDA graphs of the engine's passes."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def captured(run: Callable[[], None], memory: Any, device: torch.device) -> "torch.cuda.CUDAGraph":
    """What `run` launches, on the current stream, which is not the default one.

    Other threads may use the device meanwhile. `memory`: a `graph_pool_handle`, shared by graphs
    that are replayed one after the other. What `run` raises is raised.
    """
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream(device)
    how = {"capture_error_mode": "thread_local"}
    with without_collection(), torch.cuda.graph(graph, memory, stream, **how):
        run()
    return graph


@contextmanager
def without_collection() -> Iterator[None]:
    """No garbage collection meanwhile: it may free what engines of before have left, their graphs
    and kernels, and a capture does not outlive that."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
