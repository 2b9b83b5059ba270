"""From the host to a device without a wait of the host."""

import torch
from torch import Tensor


def to_device(device: torch.device, part: Tensor) -> Tensor:
    """`part`, which may be there already."""
    return pinned(device, part).to(device, non_blocking=True)


def pinned(device: torch.device, part: Tensor) -> Tensor:
    """`part`, on the host in memory that a GPU copies from while the host goes on."""
    return part.pin_memory() if device.type == "cuda" and not part.is_cuda else part
