"""CUDA graphs of the engine's passes."""

from collections.abc import Callable
from typing import Any

import torch

from twellctl.here.captures import without_collection


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
