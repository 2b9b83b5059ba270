"""Rounding to e4m3, a scale a row: the launches of kernels/ffn/quantise_*.cu."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .twell_fp8 import E4M3, Fp8Weight
from .twell_launch import KernelSet
from .twell_plan import Limits, ceil_div, round_up
from .twell_spec import QUANTISE_BLOCK
from .twell_weights import FFN

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
        (
            *(x, M, ffn.N, K, ffn.s_gate, ffn.s_up, ffn.b_gate, ffn.b_up),
            *(values, token_scales),
        ),
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
