"""The walk of twell_walk.py behind torch's gate product, over e4m3 weights.

    quantise_inputs -> torch's gate product -> walk_gate -> the heavy rows

The equation is that of twell_lists_e4m3.py: inputs are rounded to e4m3 with a scale for each row. h
is rounded to bf16, as with few tokens.
"""

import torch
from torch import Tensor

from .twell_fp8 import Fp8Weight, rounded_product
from .twell_heavy import Heavy, launch_heavy_e4m3, widen
from .twell_heavy_walk import launch_heavy_walk
from .twell_launch import KernelSet
from .twell_plan import Limits
from .twell_quantise import quantise_inputs
from .twell_spec import E4M3_END
from .twell_walk import plan_walk
from .twell_weights import FFN

# beside those of the lists over e4m3 weights
WALK_E4M3_KERNELS = (
    "quantise_inputs",
    *(f"{name}{E4M3_END}" for name in ("walk_gate", "heavy_walk_gate")),
)


def walk_gate_e4m3_ffn(kernels: KernelSet, limits: Limits, x: Tensor, ffn: FFN) -> Tensor:
    """`[M, K]` bf16 to `[M, K]`, contiguous, of what `takes_walk`; K and N multiples of 128.

    The three weights of `ffn` are e4m3, contiguous, with their scales.
    """
    M, N, K = x.shape[0], ffn.N, ffn.K
    rows = quantise_inputs(kernels, x)
    weight = Fp8Weight(ffn.w_gate, ffn.s_gate[:, None], ffn.b_gate)
    gate = (rounded_product(rows.values, rows.scales, weight, x.dtype),)
    plan = plan_walk(M, N, K, limits, E4M3_END)
    y, x_rows = torch.empty_like(x), torch.empty_like(rows.values)
    heavy = Heavy(rows.heavy_count.new_empty(M), rows.heavy_count)
    kernels.launch(
        f"walk_gate{E4M3_END}",
        (M,),
        plan.threads * plan.ways,
        (
            *(rows.values, ffn.w_up, ffn.w_down, ffn.b_up, ffn.b_down),
            *(*gate, N, K, plan.cap, plan.ways),
            *(heavy.rows, heavy.count, x_rows, y),
            *(rows.token_scales, ffn.s_up, ffn.s_down),
        ),
        plan.smem_bytes,
        overlap=True,
    )
    given = gate, heavy, y, rows.token_scales
    heavy = launch_heavy_walk(kernels, limits, rows.values, ffn, *given, overlap=True)
    wide = widen(kernels, limits, ffn, heavy, overlap=True)
    given = x_rows, rows.token_scales, x.new_empty(M, N), wide, ffn, y
    launch_heavy_e4m3(kernels, limits, *given, heavy, overlap=True)
    return y
