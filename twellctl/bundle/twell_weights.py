"""The weights of a gated FFN, as the kernels read them."""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True)
class FFN:
    """The weights of one gated FFN, all three by rows of neurons; biases `[N]`, `[N]`, `[K]`.

    `w_gate`, `w_up` and `w_down` are `[N, K]`: the last is an nn.Linear's weight turned over, so
    that what a neuron adds to y lies together. The kernels want all contiguous.
    """

    w_gate: Tensor
    w_up: Tensor
    w_down: Tensor
    b_gate: Tensor | None
    b_up: Tensor | None
    b_down: Tensor | None

    @cached_property
    def N(self) -> int:
        """Neurons."""
        return self.w_gate.shape[0]

    @cached_property
    def K(self) -> int:
        """Hidden size."""
        return self.w_gate.shape[1]

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """Weights, and the biases there are."""
        weights = (self.w_gate, self.w_up, self.w_down)
        return (*weights, *(b for b in (self.b_gate, self.b_up, self.b_down) if b is not None))
