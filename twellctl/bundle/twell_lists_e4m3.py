"""The gated FFN for many tokens over e4m3 weights on Hopper: only what fires, as twell_sequence.py.

    quantise_rows -> gate_pack -> plan_cluster -> up -> hidden -> down -> the heavy rows, densely

The gate, up and what fires are those of twell_fp8.py: of inputs rounded to e4m3 with a scale for
each row. h is not rounded to e4m3 but kept in f16, so down is nearer to the equation than there.
What the kernels do stands in their heads, in kernels/ffn/.
"""

import numpy as np
import torch
from torch import Tensor

from .twell_launch import KernelSet, tensor_map
from .twell_plan import HEAVY_SMEM, Limits, heavy_window, hopper_cap, product_grid
from .twell_quantise import quantise_rows
from .twell_sequence import (
    Heavy,
    chunks_of,
    launch_down,
    launch_gate_pack,
    launch_hidden,
    launch_plan,
    launch_up,
    packed_buffers,
)
from .twell_spec import (
    E4M3_END,
    GATHER_BLOCK,
    INPUT_BOX_ROWS,
    PRODUCT_BLOCK,
    PRODUCT_INNER,
    WEIGHT_BOX_ROWS,
)
from .twell_weights import FFN

LISTS_E4M3_KERNELS = (
    "quantise_rows",
    f"gate_pack{E4M3_END}",
    f"gate_pack_short{E4M3_END}",
    "plan_cluster",
    *(f"{name}{E4M3_END}" for name in ("up", "hidden", "down")),
    "heavy_gather",
    "heavy_widen",
    f"heavy_hidden{E4M3_END}",
    f"heavy_down{E4M3_END}",
)


def lists_e4m3_ffn(kernels: KernelSet, limits: Limits, x: Tensor, ffn: FFN, slots: int) -> Tensor:
    """`[M, K]` bf16 to `[M, K]`, M >= 1, contiguous; K a multiple of 128, N of 8.

    The three weights of `ffn` are e4m3, contiguous, with their scales. `slots` entries a tile; rows
    with more go densely.
    """
    y = torch.empty_like(x)
    values, token_scales = quantise_rows(kernels, limits, x, ffn)
    cap, first = hopper_cap(ffn.N), 0
    for plan, xs, ys in chunks_of(values, y, ffn, slots, cap, limits, portable=False):
        of_tokens = token_scales[first : first + plan.M]
        first += plan.M
        packed = packed_buffers(plan, x.device)
        scales = of_tokens, ffn.s_gate
        launch_gate_pack(kernels, limits, xs, ffn.w_gate, ffn.b_gate, *packed, scales)
        lists = launch_plan(kernels, plan, *packed, clusters=True)
        partial = launch_up(kernels, plan, xs, ffn.w_up, lists)
        scales = of_tokens, ffn.s_up
        lists = launch_hidden(kernels, limits, plan, partial, ffn, lists, scales)
        launch_down(kernels, plan, ffn, lists, ys, (of_tokens, ffn.s_down))
        heavy = lists.heavy_rows, lists.heavy_count
        _heavy_products(kernels, limits, xs, of_tokens, ys, ffn, *heavy)
    return y


def _heavy_products(
    kernels: KernelSet,
    limits: Limits,
    values: Tensor,
    token_scales: Tensor,
    y: Tensor,
    ffn: FFN,
    heavy_rows: Tensor,
    heavy_count: Tensor,
) -> None:
    """The rows that `plan` left out, densely. Windows behind the device's count return at once."""
    M, N, K = values.shape[0], ffn.N, ffn.K
    window = heavy_window(M, N, K)
    x_rows, hidden = values.new_empty((window, K)), y.new_empty((window, N))
    wide = widen(kernels, limits, ffn, heavy_count)
    for start in range(0, M, window):
        kernels.launch(
            "heavy_gather",
            (min(window, 4 * limits.num_sms),),
            GATHER_BLOCK,
            (values, heavy_rows, heavy_count, start, window, ffn.shorts, x_rows),
        )
        heavy = Heavy(heavy_rows, heavy_count, start=start)
        launch_heavy_e4m3(kernels, limits, x_rows, token_scales, hidden, wide, ffn, y, heavy)


def widen(
    kernels: KernelSet, limits: Limits, ffn: FFN, heavy_count: Tensor, *, overlap: bool = False
) -> Tensor:
    """W_down `[N, K]` in bf16, without its scales, if there is any heavy row."""
    wide = torch.empty_like(ffn.w_down, dtype=torch.bfloat16)
    args = ffn.w_down, np.int64(ffn.w_down.numel()), heavy_count, wide
    kernels.launch("heavy_widen", (4 * limits.num_sms,), GATHER_BLOCK, args, overlap=overlap)
    return wide


def launch_heavy_e4m3(
    kernels: KernelSet,
    limits: Limits,
    x_rows: Tensor,
    token_scales: Tensor,
    hidden: Tensor,
    wide: Tensor,
    ffn: FFN,
    y: Tensor,
    heavy: Heavy,
    *,
    overlap: bool = False,
) -> None:
    """Listed `heavy` rows of `y` from `x_rows` e4m3 `[window, K]`, by `hidden` `[window, N]`.

    `token_scales` `[M, 2]`, by tokens. `wide`: what `widen` made.
    """
    (window, N), K = hidden.shape, ffn.K
    listed = heavy.rows, heavy.count, heavy.start, window
    weights = (tensor_map(t, WEIGHT_BOX_ROWS) for t in (ffn.w_gate, ffn.w_up))
    kernels.launch(
        f"heavy_hidden{E4M3_END}",
        (product_grid(window, 2 * N, limits.num_sms),),
        PRODUCT_BLOCK,
        (
            *(tensor_map(x_rows, INPUT_BOX_ROWS), *weights, ffn.b_gate, ffn.b_up),
            *(*listed, N, K, hidden, token_scales, ffn.s_gate, ffn.s_up),
        ),
        HEAVY_SMEM,
        overlap=overlap,
    )
    kernels.launch(
        f"heavy_down{E4M3_END}",
        (product_grid(window, K, limits.num_sms),),
        PRODUCT_BLOCK,
        (
            *(tensor_map(hidden, INPUT_BOX_ROWS), tensor_map(wide, PRODUCT_INNER)),
            *(ffn.b_down, *listed, N, K, y, ffn.s_down),
        ),
        HEAVY_SMEM,
        overlap=overlap,
    )
