"""Inputs of one gated FFN whose density is known beforehand.

`x ~ N(0, 1)` with channel 0 set to 1, gate weights `N(0, 1/K)` with column 0 set to the normal
quantile of the density. So neurons fire independently of each other, and for every token anew: no
two tokens share more of them than chance has it, which is the hardest case for what reads the
weights of fired neurons only.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from .twell_weights import FFN, plain_weight

BIAS_STD = 0.05
FULL = 8.0  # standard deviations: every neuron of every row fires


@dataclass(frozen=True)
class FfnWeights:
    """The weights of one gated FFN; gate and up are halves of one matrix, so both forms share it.

    `gate_up` `[2N, K]`, `down` `[K, N]`, `gate_up_bias` `[2N]`, `down_bias` `[K]`.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @property
    def ffn(self) -> FFN:
        """As the kernels take it, views."""
        gate, up = plain_weight(self.gate_up, self.gate_up_bias).chunk(2)
        return FFN(gate, up, plain_weight(self.down, self.down_bias))

    @property
    def split(self) -> tuple[Tensor | None, ...]:
        """(w_gate, w_up, w_down, b_gate, b_up, b_down), views."""
        biases = (None, None) if self.gate_up_bias is None else self.gate_up_bias.chunk(2)
        return (*self.gate_up.chunk(2), self.down, *biases, self.down_bias)


def make_weights(
    K: int, N: int, density: float, *, bias: bool, dtype: torch.dtype, generator: torch.Generator
) -> FfnWeights:
    """Random weights whose gate fires at `density` for rows of `make_rows`."""
    device = generator.device

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(shape, generator=generator, device=device) * std

    gate_up = normal(2 * N, K, std=K**-0.5)
    # times the standard deviation of a gate over neurons, without what channel 0 adds
    gate_up[:N, 0] = quantile(density) * math.sqrt((K - 1) / K + (BIAS_STD**2 if bias else 0))
    biases = (None, None)
    if bias:
        biases = (normal(2 * N, std=BIAS_STD).to(dtype), normal(K, std=BIAS_STD).to(dtype))
    down = normal(K, N, std=K**-0.5)
    return FfnWeights(gate_up.to(dtype), down.to(dtype), *biases)


def make_rows(M: int, K: int, *, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Random rows `[M, K]`, for each of which neurons of `make_weights` fire."""
    x = torch.randn((M, K), generator=generator, device=generator.device, dtype=dtype)
    x[:, 0] = 1
    return x


def quantile(density: float) -> float:
    """Where the normal distribution reaches `density`: what channel 0 adds to each gate."""
    if density >= 1:
        return FULL
    return NormalDist().inv_cdf(density)
