"""The walks of twell_walk.py over e4m3 weights.

    walk_gate_e4m3_ffn:    quantise_short -> torch's gate product -> walk_gate -> the heavy rows
    walk_packed_e4m3_ffn:  quantise_short -> gate_pack -> walk -> the heavy rows

The equation is that of twell_lists_e4m3.py: inputs are rounded to e4m3 with a scale for each row. h
is rounded to bf16, as with few tokens. Both list the heavy rows, which are computed densely.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .twell_fp8 import Fp8Weight, rounded_product
from .twell_launch import KernelSet, Limits
from .twell_lists_e4m3 import launch_heavy_e4m3, widen
from .twell_plan import ceil_div, make_plan, round_up
from .twell_sequence import Heavy, launch_gate_pack, packed_buffers
from .twell_spec import E4M3_END, QUANTISE_BLOCK
from .twell_walk import plan_walk
from .twell_weights import FFN


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


def walk_gate_e4m3_ffn(kernels: KernelSet, limits: Limits, x: Tensor, ffn: FFN) -> Tensor:
    """`[M, K]` bf16 to `[M, K]`, contiguous, of what `takes_walk`; K and N multiples of 128.

    The three weights of `ffn` are e4m3, contiguous, with their scales.
    """
    rows = quantise_short(kernels, x)
    weight = Fp8Weight(ffn.w_gate, ffn.s_gate[:, None], ffn.b_gate)
    gate = rounded_product(rows.values, rows.scales, weight, x.dtype)
    return _walk(kernels, limits, "walk_gate", x, rows, ffn, (gate, ffn.N, ffn.K))


def walk_packed_e4m3_ffn(
    kernels: KernelSet, limits: Limits, x: Tensor, ffn: FFN, slots: int
) -> Tensor:
    """The same behind `gate_pack`; `slots` as in `lists_e4m3_ffn`."""
    M, N, K = x.shape[0], ffn.N, ffn.K
    rows = quantise_short(kernels, x)
    laid = make_plan(M, N, ffn.shorts, slots, plan_walk(M, N, K, limits, E4M3_END).cap, limits)
    counts, entries, _ = packed_buffers(laid, x.device)
    weight, packed = (ffn.w_gate, ffn.b_gate), (counts, entries, rows.heavy_count)
    scales = rows.token_scales, ffn.s_gate
    launch_gate_pack(kernels, limits, rows.values, *weight, *packed, scales, overlap=True)
    of_gate = counts, entries, K, laid.num_gate_tiles, slots
    return _walk(kernels, limits, "walk", x, rows, ffn, of_gate)


def quantise_short(kernels: KernelSet, x: Tensor) -> RoundedRows:
    """x `[M, K]` bf16, contiguous, rounded for a walk or for torch's products."""
    M, K = x.shape
    rows = RoundedRows(
        torch.empty_like(x, dtype=torch.float8_e4m3fn),
        x.new_empty((M, 2), dtype=torch.float32),
        x.new_empty((M, 1), dtype=torch.float32),
        x.new_empty(1, dtype=torch.int32),
    )
    kernels.launch(
        "quantise_short",
        (M,),
        quantise_block(K),
        (x, K, rows.values, rows.token_scales, rows.scales, rows.heavy_count),
    )
    return rows


def quantise_block(columns: int) -> int:
    """Threads that share a row of so many columns, a multiple of 32 up to QUANTISE_BLOCK.

    The fewest with which none has more groups of eight columns than with QUANTISE_BLOCK.
    """
    eights = ceil_div(columns, 8)
    return round_up(ceil_div(eights, ceil_div(eights, QUANTISE_BLOCK)), 32)


def _walk(
    kernels: KernelSet,
    limits: Limits,
    name: str,
    x: Tensor,
    rows: RoundedRows,
    ffn: FFN,
    of_gate: tuple,
) -> Tensor:
    M, N, K = x.shape[0], ffn.N, ffn.K
    plan = plan_walk(M, N, K, limits, E4M3_END)
    y, x_rows = torch.empty_like(x), torch.empty_like(rows.values)
    heavy_rows, heavy_count = rows.heavy_count.new_empty(M), rows.heavy_count
    kernels.launch(
        f"{name}{E4M3_END}",
        (M,),
        plan.threads * plan.ways,
        (
            *(rows.values, ffn.w_up, ffn.w_down, ffn.b_up, ffn.b_down, *of_gate, plan.cap),
            *(plan.ways, heavy_rows, heavy_count, x_rows, y),
            *(rows.token_scales, ffn.s_up, ffn.s_down),
        ),
        plan.smem_bytes,
        overlap=True,
    )
    wide = widen(kernels, limits, ffn, heavy_count, overlap=True)
    given = x_rows, rows.token_scales, x.new_empty(M, N), wide, ffn, y
    heavy = Heavy(heavy_rows, heavy_count)
    launch_heavy_e4m3(kernels, limits, *given, heavy, overlap=True)
    return y
