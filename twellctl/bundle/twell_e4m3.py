"""Rounding to e4m3 by kernels of ours, a scale a row (kernels/ffn/quantise_*.cu); the dense FFN.

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
from dataclasses import dataclass

import torch
from torch import Tensor

from .twell_fp8 import E4M3, Fp8Weight, bare_product, joined, rounded_product
from .twell_launch import KernelSet
from .twell_plan import Limits, ceil_div, round_up
from .twell_spec import QUANTISE_BLOCK
from .twell_weights import FFN

DENSE_E4M3_KERNELS = ("quantise_inputs", "quantise_hidden", "quantise_bare_hidden", "scale_sums")
BARE_TOKENS = 256  # as found on an H200
_QUANTISE_BLOCKS = 2  # of a multiprocessor


@dataclass(frozen=True)
class RoundedRows:
    """x in e4m3, for a walk or a dense product, which reads `values`, `scales` and `one` alone.

    `values` `[M, K]` e4m3; `token_scales` float32 `[M, 2]`: scales, and ones; `scales` `[M, 1]`:
    the same scales; `one` float32 `[1]`: 1; `heavy_count` int32 `[1]`: 0.
    """

    values: Tensor
    token_scales: Tensor
    scales: Tensor
    one: Tensor
    heavy_count: Tensor


def quantise_rows(kernels: KernelSet, limits: Limits, x: Tensor, ffn: FFN) -> tuple[Tensor, Tensor]:
    """(`x` `[M, K]` in e4m3, float32 `[M, 2]`: scales, and powers of two of which h is divided)."""
    M, K = x.shape
    values = torch.empty_like(x, dtype=E4M3)
    token_scales = x.new_empty((M, 2), dtype=torch.float32)
    kernels.launch(
        "quantise_rows",
        (min(ceil_div(M, QUANTISE_BLOCK // 32), _QUANTISE_BLOCKS * limits.num_sms),),
        QUANTISE_BLOCK,
        (*(x, M, ffn.N, K, ffn.s_gate, ffn.s_up, ffn.b_gate, ffn.b_up), *(values, token_scales)),
    )
    return values, token_scales


def quantise_inputs(kernels: KernelSet, x: Tensor) -> RoundedRows:
    """x `[M, K]` bf16, contiguous, rounded for a walk or for torch's products."""
    M, K = x.shape
    rows = RoundedRows(
        torch.empty_like(x, dtype=E4M3),
        x.new_empty((M, 2), dtype=torch.float32),
        x.new_empty((M, 1), dtype=torch.float32),
        x.new_empty(1, dtype=torch.float32),
        x.new_empty(1, dtype=torch.int32),
    )
    kernels.launch(
        "quantise_inputs",
        (M,),
        quantise_block(K),
        (x, K, rows.values, rows.token_scales, rows.scales, rows.one, rows.heavy_count),
    )
    return rows


def quantise_hidden(
    kernels: KernelSet,
    gate: Tensor,
    up: Tensor,
    lacks: tuple[Tensor, Fp8Weight, Fp8Weight] | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`round_rows` of h = relu(gate) * up: e4m3 `[M, N]`, float32 scales `[M, 1]`.

    `gate` and `up` are bf16 `[M, N]`, M >= 1, with one stride from row to row; it and N are
    multiples of 8. `lacks`: they are sums of e4m3 numbers, and lack these scales of x and those and
    the biases of these weights. How many neurons fire is added to `counts` int32 `[M]`.
    """
    (M, N), pitch = gate.shape, gate.stride(0)
    values = gate.new_empty((M, N), dtype=E4M3)
    scales = gate.new_empty((M, 1), dtype=torch.float32)
    products, found = (gate, up, N, pitch), (counts, values, scales)
    if lacks is None:
        name, args = "quantise_hidden", (*products, *found)
    else:
        x, *weights = lacks
        of_weights = (*(w.scale for w in weights), *(w.bias for w in weights))
        name, args = "quantise_bare_hidden", (*products, x, *of_weights, *found)
    kernels.launch(name, (M,), quantise_block(N), args)
    return values, scales


def scale_sums(
    kernels: KernelSet, sums: Tensor, scales: Tensor, weight: Fp8Weight, residual: Tensor | None
) -> Tensor:
    """The product `[M, N]` of which `sums`, bf16, lack `scales` `[M, 1]` and those of `weight`.

    With its bias, and onto `residual`, if that is given. N is a multiple of 8.
    """
    (M, N), y = sums.shape, torch.empty_like(sums)
    args = sums, N, scales, weight.scale, weight.bias, residual, y
    kernels.launch("scale_sums", (M,), quantise_block(N), args)
    return y


def quantise_block(columns: int) -> int:
    """Threads that share a row of so many columns, a multiple of 32 up to QUANTISE_BLOCK.

    The fewest with which none has more groups of eight columns than with QUANTISE_BLOCK.
    """
    eights = ceil_div(columns, 8)
    return round_up(ceil_div(eights, ceil_div(eights, QUANTISE_BLOCK)), 32)


# ---- densely


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
