"""Rounding to e4m3, a scale a row: the launches of kernels/ffn/quantise_rows.cu."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .twell_fp8 import E4M3
from .twell_launch import KernelSet, Limits
from .twell_plan import ceil_div, round_up
from .twell_spec import QUANTISE_BLOCK
from .twell_weights import FFN

_QUANTISE_BLOCKS = 2  # of a multiprocessor


@dataclass(frozen=True)
class RoundedRows:
    """x in e4m3, for a walk or a dense product, which reads `values` and `scales` alone.

    `values` `[M, K]` e4m3; `token_scales` float32 `[M, 2]`: scales, and ones; `scales` `[M, 1]`:
    the same scales; `heavy_count` int32 `[1]`: 0.
    """

    values: Tensor
    token_scales: Tensor
    scales: Tensor
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
        x.new_empty(1, dtype=torch.int32),
    )
    kernels.launch(
        "quantise_inputs",
        (M,),
        quantise_block(K),
        (x, K, rows.values, rows.token_scales, rows.scales, rows.heavy_count),
    )
    return rows


def quantise_hidden(kernels: KernelSet, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """`round_rows` of h = relu(gate) * up: e4m3 `[M, N]`, float32 scales `[M, 1]`.

    `gate` and `up` are bf16 `[M, N]`, M >= 1, with one stride from row to row; it and N are
    multiples of 8.
    """
    (M, N), pitch = gate.shape, gate.stride(0)
    values = gate.new_empty((M, N), dtype=E4M3)
    scales = gate.new_empty((M, 1), dtype=torch.float32)
    args = gate, up, N, pitch, values, scales
    kernels.launch("quantise_hidden", (M,), quantise_block(N), args)
    return values, scales


def quantise_block(columns: int) -> int:
    """Threads that share a row of so many columns, a multiple of 32 up to QUANTISE_BLOCK.

    The fewest with which none has more groups of eight columns than with QUANTISE_BLOCK.
    """
    eights = ceil_div(columns, 8)
    return round_up(ceil_div(eights, ceil_div(eights, QUANTISE_BLOCK)), 32)
