"""The gated FFN for many tokens over e4m3 weights on Hopper: only what fires, as twell_sequence.py.

    quantise_rows -> gate_pack -> plan_cluster -> up -> hidden -> down -> the heavy rows

The gate, up and what fires are those of twell_fp8.py: of inputs rounded to e4m3 with a scale for
each row. h is not rounded to e4m3 but kept in f16, so down is nearer to the equation than there.
What the kernels do stands in their heads, in kernels/ffn/.
"""

import torch
from torch import Tensor

from .twell_heavy import Heavy, heavy_e4m3_products
from .twell_heavy_walk import launch_heavy_walk
from .twell_launch import KernelSet
from .twell_plan import Limits, hopper_cap
from .twell_quantise import quantise_rows
from .twell_sequence import (
    chunks_of,
    launch_down,
    launch_gate_pack,
    launch_hidden,
    launch_plan,
    launch_up,
    packed_buffers,
)
from .twell_spec import E4M3_END
from .twell_weights import FFN

LISTS_E4M3_KERNELS = (
    "quantise_rows",
    f"gate_pack{E4M3_END}",
    "plan_cluster",
    *(f"{name}{E4M3_END}" for name in ("up", "hidden", "down")),
    f"heavy_walk{E4M3_END}",
    "heavy_gather",
    "heavy_widen",
    f"heavy_hidden{E4M3_END}",
    f"heavy_down{E4M3_END}",
)


def lists_e4m3_ffn(kernels: KernelSet, limits: Limits, x: Tensor, ffn: FFN, slots: int) -> Tensor:
    """`[M, K]` bf16 to `[M, K]`, M >= 1, contiguous; K a multiple of 128, N of 8.

    The three weights of `ffn` are e4m3, contiguous, with their scales. `slots` entries a tile; a
    row with more is heavy.
    """
    y = torch.empty_like(x)
    values, token_scales = quantise_rows(kernels, limits, x, ffn)
    cap, first = hopper_cap(ffn.N), 0
    for plan, xs, ys in chunks_of(values, y, ffn, slots, cap, limits):
        of_tokens = token_scales[first : first + plan.M]
        first += plan.M
        packed = packed_buffers(plan, x.device)
        scales = of_tokens, ffn.s_gate
        launch_gate_pack(kernels, limits, xs, ffn.w_gate, ffn.b_gate, *packed, scales)
        lists = launch_plan(kernels, plan, *packed)
        partial = launch_up(kernels, plan, xs, ffn.w_up, lists)
        scales = of_tokens, ffn.s_up
        lists = launch_hidden(kernels, limits, plan, partial, ffn, lists, scales)
        launch_down(kernels, plan, ffn, lists, ys, (of_tokens, ffn.s_down))
        heavy = Heavy(lists.heavy_rows, lists.heavy_count)
        heavy = launch_heavy_walk(kernels, limits, xs, ffn, packed[:2], heavy, ys, of_tokens)
        heavy_e4m3_products(kernels, limits, xs, of_tokens, ys, ffn, heavy)
    return y
