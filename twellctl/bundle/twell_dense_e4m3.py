"""The gated FFN over e4m3 weights on Hopper, densely: torch's FP8 products between two kernels.

    quantise_inputs -> torch's products for gate and up -> quantise_hidden -> torch's for down

Gate and up are one product where one lies behind the other, as `lay_together` lays them.

The equation is that of `fp8_ffn` (twell_fp8.py), and beyond BARE_TOKENS its bits. torch.compile
does not see into the operator, so plain torch would round x and h there in a dozen kernels; ours do
it instead.

Up to BARE_TOKENS torch's products with a scale for each row are slower than those with one scale.
So both factors go without any there, and our kernels multiply by the scales: quantise_bare_hidden,
and scale_sums behind down. Sums are rounded to bf16 once more, before that.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .twell_fp8 import Fp8Weight, bare_product, joined, rounded_product
from .twell_launch import KernelSet
from .twell_plan import Limits
from .twell_quantise import RoundedRows, quantise_hidden, quantise_inputs, scale_sums
from .twell_weights import FFN

DENSE_E4M3_KERNELS = ("quantise_inputs", "quantise_hidden", "quantise_bare_hidden", "scale_sums")
BARE_TOKENS = 256  # as found on an H200


def fp8_weights(ffn: FFN) -> Iterator[Fp8Weight]:
    """Gate, up and down of e4m3 weights, as `fp8_ffn` takes them."""
    values = ffn.w_gate, ffn.w_up, ffn.w_down.t()
    scales = ffn.s_gate, ffn.s_up, ffn.s_down
    biases = ffn.b_gate, ffn.b_up, ffn.b_down
    for w, scale, bias in zip(values, scales, biases, strict=True):
        yield Fp8Weight(w, scale[:, None], bias)


def dense_e4m3_ffn(
    kernels: KernelSet,
    limits: Limits,
    x: Tensor,
    ffn: FFN,
    *,
    residual: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """`[M, K]` bf16 to `[M, K]`, M >= 1, contiguous; K and N multiples of 16.

    The three weights of `ffn` are e4m3, with their scales; `w_down` has strides (1, N). y comes on
    top of `residual`, if that is given. How many neurons fire is added to `counts` int32 `[M]`.
    """
    gate, up, down = fp8_weights(ffn)
    rows = quantise_inputs(kernels, x)
    values, scales = _hidden(kernels, rows, gate, up, counts)
    return _product(kernels, values, scales, rows.one, down, residual)


def dense_e4m3_linear(
    kernels: KernelSet, x: Tensor, weight: Fp8Weight, residual: Tensor | None = None
) -> Tensor:
    """`fp8_linear` of `[M, K]` bf16, M >= 1, contiguous; K and N multiples of 16; bits as above.

    y comes on top of `residual`, if that is given.
    """
    rows = quantise_inputs(kernels, x)
    return _product(kernels, rows.values, rows.scales, rows.one, weight, residual)


def _hidden(
    kernels: KernelSet, rows: RoundedRows, gate: Fp8Weight, up: Fp8Weight, counts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What `quantise_hidden` gives; the products are gone then."""
    is_bare = len(rows.values) <= BARE_TOKENS

    def product(weight: Fp8Weight) -> Tensor:
        if is_bare:
            return bare_product(rows.values, weight.values, rows.one)
        return rounded_product(rows.values, rows.scales, weight, torch.bfloat16)

    both = joined(gate, up)
    products = (product(gate), product(up)) if both is None else product(both).chunk(2, 1)
    lacks = (rows.scales, gate, up) if is_bare else None
    return quantise_hidden(kernels, *products, lacks, counts)


def _product(
    kernels: KernelSet,
    values: Tensor,
    scales: Tensor,
    one: Tensor,
    weight: Fp8Weight,
    residual: Tensor | None,
) -> Tensor:
    if len(values) <= BARE_TOKENS:
        sums = bare_product(values, weight.values, one)
        return scale_sums(kernels, sums, scales, weight, residual)
    y = rounded_product(values, scales, weight, torch.bfloat16)
    return y if residual is None else residual + y
