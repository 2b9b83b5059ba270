"""Few heavy rows on Hopper: over what fires, as few tokens go, in front of the dense kernels.

    heavy_walk or heavy_walk_gate -> the kernels of twell_heavy.py, which do nothing then

Only the device knows how many there are, so all are launched. Weights are bf16, or e4m3 with
scales; then so is x. What it does stands in kernels/ffn/heavy_walk.cuh.
"""

from dataclasses import replace
from functools import lru_cache

from torch import Tensor

from .twell_config import TILE
from .twell_few_walk import FewWalkPlan, most_inputs, plan_clusters
from .twell_heavy import Heavy
from .twell_launch import KernelSet
from .twell_plan import STATIC_SMEM, Limits, ceil_div
from .twell_spec import HEAVY_WALK_SIZE
from .twell_weights import FFN, end_of

FEW_HEAVY = 32  # rows; of more, all weights are read once for all of them

Gate = tuple[Tensor] | tuple[Tensor, Tensor]  # dense `[M, N]`; or counts and entries, packed


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
