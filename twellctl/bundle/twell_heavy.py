"""Heavy rows on Hopper: tokens with too many neurons for a walk or the lists.

    heavy_walk or heavy_walk_gate                  up to FEW_HEAVY: over what fires, as few tokens
    heavy_gather -> heavy_hidden -> heavy_down     more: densely; e4m3 W_down is widened before

Which rows those are only the device knows, so all is launched, densely for each window of tokens.
The walk does nothing where there are more, the others where it has had them all. Weights are bf16,
or e4m3 with scales; then so is x. The kernels stand in heavy_walk.cuh and heavy.cuh.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from .twell_config import TILE
from .twell_few_walk import FewWalkPlan, most_inputs, plan_clusters
from .twell_launch import KernelSet, tensor_map
from .twell_plan import HEAVY_SMEM, STATIC_SMEM, Limits, ceil_div, heavy_window, product_grid
from .twell_spec import (
    GATHER_BLOCK,
    HEAVY_WALK_SIZE,
    INPUT_BOX_ROWS,
    PRODUCT_BLOCK,
    PRODUCT_INNER,
    WEIGHT_BOX_ROWS,
)
from .twell_weights import FFN, end_of

FEW_HEAVY = 32  # rows; of more, all weights are read once for all of them

Gate = tuple[Tensor] | tuple[Tensor, Tensor]  # dense `[M, N]`; or counts and entries, packed


@dataclass(frozen=True)
class Heavy:
    """`count` of the list `rows`, from `start` on; none if `count` is at most `few`."""

    rows: Tensor
    count: Tensor
    few: int = 0
    start: int = 0


# ---- few: over what fires


@lru_cache(maxsize=4096)
def plan_heavy_walk(
    N: int, K: int, limits: Limits, end: str = "", *, packed: bool
) -> FewWalkPlan | None:
    """For N neurons and inputs of K; None of what it does not take. `end`: E4M3_END or ""."""
    tiles = ceil_div(ceil_div(N, TILE), HEAVY_WALK_SIZE)  # of a block: 32 of the largest N
    if most_inputs(end) < K:
        return None
    name = f"heavy_walk{'' if packed else '_gate'}{end}"
    cap = tiles * TILE if packed else 8 * ceil_div(N // 8, HEAVY_WALK_SIZE)
    plan = plan_clusters(name, K, HEAVY_WALK_SIZE, cap, end)
    return plan if plan.smem_bytes + STATIC_SMEM <= limits.smem_bytes else None


def launch_heavy_walk(
    kernels: KernelSet,
    limits: Limits,
    x: Tensor,
    ffn: FFN,
    gate: Gate,
    heavy: Heavy,
    y: Tensor,
    token_scales: Tensor | None = None,
    *,
    overlap: bool = False,
) -> Heavy:
    """The rows of `y` `[M, K]` that `heavy` lists, from those of `x`, if there are few.

    `gate` is that of `x`. `token_scales`: `[M, 2]`, if x is e4m3. Returns `heavy` for
    the dense kernels, which leave out what was done here.
    """
    N, K, end, packed = ffn.N, ffn.K, end_of(ffn.w_up), len(gate) == 2
    plan = plan_heavy_walk(N, K, limits, end, packed=packed)
    if plan is None:
        return heavy
    heavy = replace(heavy, few=min(FEW_HEAVY, len(x)))
    of_gate = gate
    if packed:
        of_gate += (*gate[1].shape[1:], ffn.w_gate, ffn.b_gate)
        of_gate += (ffn.s_gate,) if end else ()
    kernels.launch(
        plan.name,
        (heavy.few * plan.size,),
        plan.threads,
        (
            *(x, ffn.w_up, ffn.w_down, ffn.b_up, ffn.b_down, heavy.rows, heavy.count),
            *(plan.columns, N, K, plan.cap, plan.ways, plan.warps, heavy.few, y),
            *((token_scales, ffn.s_up, ffn.s_down) if end else ()),
            *of_gate,
        ),
        plan.smem_bytes,
        overlap=overlap,
    )
    return heavy


# ---- more: densely


def heavy_products(
    kernels: KernelSet,
    limits: Limits,
    x: Tensor,
    y: Tensor,
    ffn: FFN,
    heavy: Heavy,
    token_scales: Tensor | None = None,
    *,
    training: bool = False,
) -> None:
    """The `heavy` rows of `y` `[M, K]`, of x, window by window; `training`: smaller windows.

    `token_scales` as in `launch_heavy_walk`.
    """
    M, N, K = x.shape[0], ffn.N, ffn.K
    window = heavy_window(M, N, K, training=training)
    x_rows, hidden = x.new_empty((window, K)), y.new_empty((window, N))
    w_down = widened(kernels, limits, ffn, heavy)
    for start in range(0, M, window):
        kernels.launch(
            "heavy_gather",
            (min(window, 4 * limits.num_sms),),
            GATHER_BLOCK,
            (x, heavy.rows, heavy.count, heavy.few, start, window, ffn.shorts, x_rows),
        )
        part = replace(heavy, start=start)
        launch_heavy(kernels, limits, x_rows, hidden, ffn, w_down, y, part, token_scales)


def widened(
    kernels: KernelSet, limits: Limits, ffn: FFN, heavy: Heavy, *, overlap: bool = False
) -> Tensor:
    """W_down `[N, K]` in bf16; of e4m3 without its scales, if more than few rows are `heavy`."""
    if not end_of(ffn.w_down):
        return ffn.w_down
    wide = torch.empty_like(ffn.w_down, dtype=torch.bfloat16)
    args = ffn.w_down, np.int64(ffn.w_down.numel()), heavy.count, heavy.few, wide
    kernels.launch("heavy_widen", (4 * limits.num_sms,), GATHER_BLOCK, args, overlap=overlap)
    return wide


def launch_heavy(
    kernels: KernelSet,
    limits: Limits,
    rows: Tensor,
    hidden: Tensor,
    ffn: FFN,
    w_down: Tensor,
    y: Tensor,
    heavy: Heavy,
    token_scales: Tensor | None = None,
    *,
    overlap: bool = False,
) -> None:
    """`heavy` rows of `y` from `rows` `[window, K]`, by way of `hidden` `[window, N]`.

    `w_down` is what `widened` returned; `token_scales` `[M, 2]` by tokens, if `rows` are e4m3.
    """
    (window, N), K, end = hidden.shape, ffn.K, end_of(ffn.w_gate)
    of_window = heavy.count, heavy.few, heavy.start, window, N, K
    weights = (tensor_map(t, WEIGHT_BOX_ROWS) for t in (ffn.w_gate, ffn.w_up))
    kernels.launch(
        f"heavy_hidden{end}",
        (product_grid(window, 2 * N, limits.num_sms),),
        PRODUCT_BLOCK,
        (
            *(tensor_map(rows, INPUT_BOX_ROWS), *weights, ffn.b_gate, ffn.b_up),
            *((heavy.rows,) if end else ()),
            *(*of_window, hidden, *((token_scales, ffn.s_gate, ffn.s_up) if end else ())),
        ),
        HEAVY_SMEM,
        overlap=overlap,
    )
    kernels.launch(
        f"heavy_down{end}",
        (product_grid(window, K, limits.num_sms),),
        PRODUCT_BLOCK,
        (
            *(tensor_map(hidden, INPUT_BOX_ROWS), tensor_map(w_down, PRODUCT_INNER)),
            *(ffn.b_down, heavy.rows, *of_window, y, *((ffn.s_down,) if end else ())),
        ),
        HEAVY_SMEM,
        overlap=overlap,
    )
