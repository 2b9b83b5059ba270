"""What fires, in plain torch. The format is drawn in `kernels/README.md`."""

import torch
from torch import Tensor


def fires(gate: Tensor) -> Tensor:
    """Bool, shape of `gate`: above 0, or NaN (which must not vanish)."""
    return (gate > 0) | gate.isnan()


def keep_fired(gate: Tensor) -> Tensor:
    """ReLU: the gate, bit for bit, where it fires, else +0."""
    return torch.where(fires(gate), gate, torch.zeros_like(gate))
