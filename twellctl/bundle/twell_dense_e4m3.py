"""The gated FFN over e4m3 weights on Hopper, densely: torch's FP8 products between two kernels.

    quantise_inputs -> torch's products for gate and up -> quantise_hidden -> torch's for down

Gate and up are one product where one lies behind the other, as `lay_together` lays them.

The equation and its bits are those of `fp8_ffn` (twell_fp8.py). torch.compile does not see into the
operator, so plain torch would round x and h there in a dozen kernels; these two do it instead.
"""

from collections.abc import Iterator

from torch import Tensor

from .twell_format import fires
from .twell_fp8 import Fp8Weight, joined, rounded_product
from .twell_launch import KernelSet, Limits
from .twell_quantise import quantise_hidden, quantise_inputs
from .twell_weights import FFN

DENSE_E4M3_KERNELS = ("quantise_inputs", "quantise_hidden")


def fp8_weights(ffn: FFN) -> Iterator[Fp8Weight]:
    """Gate, up and down of e4m3 weights, as `fp8_ffn` takes them."""
    values = ffn.w_gate, ffn.w_up, ffn.w_down.t()
    scales = ffn.s_gate, ffn.s_up, ffn.s_down
    biases = ffn.b_gate, ffn.b_up, ffn.b_down
    for w, scale, bias in zip(values, scales, biases, strict=True):
        yield Fp8Weight(w, scale[:, None], bias)


def dense_e4m3_ffn(
    kernels: KernelSet, limits: Limits, x: Tensor, ffn: FFN, *, counts: Tensor | None = None
) -> Tensor:
    """`[M, K]` bf16 to `[M, K]`, M >= 1, contiguous; K and N multiples of 16.

    The three weights of `ffn` are e4m3, with their scales; `w_down` has strides (1, N). How many
    neurons fire for each token is added to `counts` `[M]`.
    """
    gate, up, down = fp8_weights(ffn)
    return rounded_product(*_hidden(kernels, x, gate, up, counts), down, x.dtype)


def _hidden(
    kernels: KernelSet, x: Tensor, gate: Fp8Weight, up: Fp8Weight, counts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What `quantise_hidden` gives; the products are gone then."""
    rows, both = quantise_inputs(kernels, x), joined(gate, up)

    def product(weight: Fp8Weight) -> Tensor:
        return rounded_product(rows.values, rows.scales, weight, x.dtype)

    of_gate, of_up = (product(gate), product(up)) if both is None else product(both).chunk(2, 1)
    if counts is not None:
        counts += fires(of_gate).sum(1)
    return quantise_hidden(kernels, of_gate, of_up)


def dense_e4m3_linear(kernels: KernelSet, x: Tensor, weight: Fp8Weight) -> Tensor:
    """`fp8_linear` of `[M, K]` bf16, M >= 1, contiguous; K a multiple of 16."""
    rows = quantise_inputs(kernels, x)
    return rounded_product(rows.values, rows.scales, weight, x.dtype)
