"""Memory that training takes on a GPU, by what torch's allocator has handed out at once."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

MIB = 2**20


class Allocator(Protocol):
    """What is asked of `torch.cuda`; bytes."""

    def memory_allocated(self) -> int: ...

    def max_memory_allocated(self) -> int: ...

    def reset_peak_memory_stats(self) -> None: ...


def passes_memory(
    forward: Callable[[], Any],
    backward: Callable[[Any], Any],
    y_bytes: int,
    allocator: Allocator = torch.cuda,
) -> dict[str, float]:
    """MiB that `backward(forward())` takes on top of what lies there before.

    "kept_mib" lie there between the two, without y; "peak_mib" at the worst moment of both, y and
    all gradients that are there by then included.
    """
    allocator.reset_peak_memory_stats()
    before = allocator.memory_allocated()
    between = forward()
    kept = allocator.memory_allocated() - before - y_bytes
    found = backward(between)
    peak = allocator.max_memory_allocated() - before
    del found
    return {"kept_mib": kept / MIB, "peak_mib": peak / MIB}


def step_memory(
    step: Callable[[], Any], own: Iterable[Tensor], allocator: Allocator = torch.cuda
) -> dict[str, float]:
    """MiB at the worst moment of a `step`, with its `own` tensors, which lie there before.

    What else lies there, as of another candidate, does not count.
    """
    owned = {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in own}
    allocator.reset_peak_memory_stats()
    before = allocator.memory_allocated()
    found = step()
    peak = allocator.max_memory_allocated() - before
    del found
    return {"peak_mib": (peak + sum(owned.values())) / MIB}
