"""The weights of a gated FFN, as the kernels read them."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .twell_spec import E4M3_END

E4M3_STEP = 128  # of e4m3 weights the kernels take sizes that are multiples of it


def end_of(weight: Tensor) -> str:
    """What ends the names of the entries that take `weight`."""
    return E4M3_END if weight.dtype == torch.float8_e4m3fn else ""


@dataclass(frozen=True)
class FFN:
    """The weights of one gated FFN, all three by rows of neurons; biases `[N]`, `[N]`, `[K]`.

    `w_gate`, `w_up` and `w_down` are `[N, K]`: the last is an nn.Linear's weight turned over, so
    that what a neuron adds to y lies together. The kernels want all contiguous. Weights in e4m3
    have scales, float32: `[N]` and `[N]` of their rows, and `[K]` of the columns of `w_down`.
    """

    w_gate: Tensor
    w_up: Tensor
    w_down: Tensor
    b_gate: Tensor | None
    b_up: Tensor | None
    b_down: Tensor | None
    s_gate: Tensor | None = None
    s_up: Tensor | None = None
    s_down: Tensor | None = None

    @cached_property
    def N(self) -> int:
        """Neurons."""
        return self.w_gate.shape[0]

    @cached_property
    def K(self) -> int:
        """Hidden size."""
        return self.w_gate.shape[1]

    @cached_property
    def shorts(self) -> int:
        """What a row of K columns takes, in units of 2 bytes: the K of kernels that count so."""
        return self.K * self.w_gate.element_size() // 2

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """Weights, and the biases and scales there are."""
        more = (self.b_gate, self.b_up, self.b_down, self.s_gate, self.s_up, self.s_down)
        return (self.w_gate, self.w_up, self.w_down, *(t for t in more if t is not None))
