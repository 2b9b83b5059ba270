"""The gated FFN over e4m3 weights on Hopper, densely: torch's FP8 products between two kernels.

    quantise_short -> torch's products for gate and up -> quantise_hidden -> torch's for down

The equation and its bits are those of `fp8_ffn` (twell_fp8.py). torch.compile does not see into the
operator, so plain torch would round x and h there in a dozen kernels; these two do it instead.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .twell_fp8 import E4M3, Fp8Weight, rounded_product
from .twell_launch import KernelSet, Limits
from .twell_walk_e4m3 import quantise_block, quantise_short
from .twell_weights import FFN


def fp8_weights(ffn: FFN) -> Iterator[Fp8Weight]:
    """Gate, up and down of e4m3 weights, as `fp8_ffn` takes them."""
    values = ffn.w_gate, ffn.w_up, ffn.w_down.t()
    scales = ffn.s_gate, ffn.s_up, ffn.s_down
    biases = ffn.b_gate, ffn.b_up, ffn.b_down
    for w, scale, bias in zip(values, scales, biases, strict=True):
        yield Fp8Weight(w, scale[:, None], bias)


def dense_e4m3_ffn(kernels: KernelSet, limits: Limits, x: Tensor, ffn: FFN) -> Tensor:
    """`[M, K]` bf16 to `[M, K]`, M >= 1, contiguous; K and N multiples of 16.

    The three weights of `ffn` are e4m3, with their scales; `w_down` has strides (1, N).
    """
    gate, up, down = fp8_weights(ffn)
    rows = quantise_short(kernels, x)
    products = (rounded_product(rows.values, rows.scales, weight, x.dtype) for weight in (gate, up))
    return rounded_product(*quantise_hidden(kernels, *products), down, x.dtype)


def quantise_hidden(kernels: KernelSet, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """`round_rows` of h = relu(gate) * up: e4m3 `[M, N]`, float32 scales `[M, 1]`.

    `gate` and `up` are bf16 `[M, N]`, M >= 1, contiguous; N a multiple of 8.
    """
    M, N = gate.shape
    values = torch.empty_like(gate, dtype=E4M3)
    scales = gate.new_empty((M, 1), dtype=torch.float32)
    kernels.launch("quantise_hidden", (M,), quantise_block(N), (gate, up, N, values, scales))
    return values, scales
