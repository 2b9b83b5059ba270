"""The gated FFN for some hundred tokens on Hopper: each token walks through what fired for it.

    torch's gate product -> walk_gate -> the heavy rows

Over e4m3 weights inputs are rounded to e4m3 before, with a scale for each row (quantise_inputs). h
is bf16, as with few tokens.

Its time goes by pairs (token, neuron that fired). With few of them it is shorter than that of the
lists of twell_sequence.py. The kernels behind the gate may start before the one in front has ended;
they read nothing before that. What they do stands in kernels/ffn/walk.cuh.

Heavy rows are tokens with too many neurons for a walk or the lists:

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
import torch.nn.functional as F
from torch import Tensor

from . import twell_spec as spec
from .twell_config import TILE
from .twell_e4m3 import quantise_inputs
from .twell_few_walk import FewWalkPlan, most_inputs, plan_clusters
from .twell_fp8 import Fp8Weight, rounded_product
from .twell_launch import KernelSet, tensor_map
from .twell_plan import (
    HEAVY_SMEM,
    STATIC_SMEM,
    Limits,
    ceil_div,
    heavy_window,
    hopper_cap,
    product_grid,
    round_up,
)
from .twell_weights import FFN, kind_of

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
    N: int, K: int, limits: Limits, kind: str = "bf16", *, packed: bool
) -> FewWalkPlan | None:
    """For N neurons and inputs of K; None of what it does not take. `kind`: of its weights."""
    tiles = ceil_div(ceil_div(N, TILE), spec.HEAVY_WALK_SIZE)  # of a block: 32 of the largest N
    if most_inputs(kind) < K:
        return None
    name = spec.entry("heavy_walk" if packed else "heavy_walk_gate", kind)
    cap = tiles * TILE if packed else 8 * ceil_div(N // 8, spec.HEAVY_WALK_SIZE)
    plan = plan_clusters(name, K, spec.HEAVY_WALK_SIZE, cap, kind)
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
    N, K, kind, packed = ffn.N, ffn.K, kind_of(ffn.w_up), len(gate) == 2
    plan = plan_heavy_walk(N, K, limits, kind, packed=packed)
    if plan is None:
        return heavy
    heavy = replace(heavy, few=min(FEW_HEAVY, len(x)))
    of_gate = (None, *gate, *gate[1].shape[1:]) if packed else (*gate, None, None, 0, 0)
    kernels.launch(
        plan.name,
        (heavy.few * plan.size,),
        plan.threads,
        (
            *(x, ffn.w_up, ffn.w_down, ffn.b_up, ffn.b_down, heavy.rows, heavy.count),
            *(plan.columns, N, K, plan.cap, plan.ways, plan.warps, heavy.few, y),
            *(token_scales, ffn.s_up, ffn.s_down),
            *(*of_gate, ffn.w_gate, ffn.b_gate, ffn.s_gate),
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
            spec.GATHER_BLOCK,
            (x, heavy.rows, heavy.count, heavy.few, start, window, ffn.shorts, x_rows),
        )
        part = replace(heavy, start=start)
        launch_heavy(kernels, limits, x_rows, hidden, ffn, w_down, y, part, token_scales)


def widened(
    kernels: KernelSet, limits: Limits, ffn: FFN, heavy: Heavy, *, overlap: bool = False
) -> Tensor:
    """W_down `[N, K]` in bf16; of e4m3 without its scales, if more than few rows are `heavy`."""
    if kind_of(ffn.w_down) == "bf16":
        return ffn.w_down
    wide = torch.empty_like(ffn.w_down, dtype=torch.bfloat16)
    args = ffn.w_down, np.int64(ffn.w_down.numel()), heavy.count, heavy.few, wide
    kernels.launch("heavy_widen", (4 * limits.num_sms,), spec.GATHER_BLOCK, args, overlap=overlap)
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
    (window, N), K, kind = hidden.shape, ffn.K, kind_of(ffn.w_gate)
    of_window = heavy.count, heavy.few, heavy.start, window, N, K
    weights = (tensor_map(t, spec.WEIGHT_BOX_ROWS) for t in (ffn.w_gate, ffn.w_up))
    kernels.launch(
        spec.entry("heavy_hidden", kind),
        (product_grid(window, 2 * N, limits.num_sms),),
        spec.PRODUCT_BLOCK,
        (
            *(tensor_map(rows, spec.INPUT_BOX_ROWS), *weights, ffn.b_gate, ffn.b_up),
            *(heavy.rows, *of_window, hidden, token_scales, ffn.s_gate, ffn.s_up),
        ),
        HEAVY_SMEM,
        overlap=overlap,
    )
    kernels.launch(
        spec.entry("heavy_down", kind),
        (product_grid(window, K, limits.num_sms),),
        spec.PRODUCT_BLOCK,
        (
            *(tensor_map(hidden, spec.INPUT_BOX_ROWS), tensor_map(w_down, spec.PRODUCT_INNER)),
            *(ffn.b_down, heavy.rows, *of_window, y, ffn.s_down),
        ),
        HEAVY_SMEM,
        overlap=overlap,
    )


MOST_PAIRS = 80_000  # as found on an H200
USUAL_DENSITY = 0.01  # where no profile tells it
_MOST_TOKENS = 4096
_MOST_OF_A_WAY = 512  # threads
_MOST_WAYS = {"bf16": 4, "e4m3": 8}  # at a time
_MOST_CAP = 512  # pairs of a token


@dataclass(frozen=True)
class WalkPlan:
    """Sizes of `walk_gate`."""

    threads: int  # of a way
    ways: int
    cap: int  # pairs that a token may have; beyond, its row is heavy
    smem_bytes: int


@lru_cache(maxsize=4096)
def plan_walk(M: int, N: int, K: int, limits: Limits, kind: str = "bf16") -> WalkPlan:
    """For M tokens, N neurons and inputs of K, over weights of `kind`."""
    chunks = ceil_div(K, 128 // spec.KINDS[kind].bits)
    threads = round_up(ceil_div(chunks, ceil_div(chunks, _MOST_OF_A_WAY)), 32)
    cap = min(hopper_cap(N), _MOST_CAP)
    most_ways = min(_MOST_WAYS[kind], cap // spec.WALK_BATCH)
    ways, tokens = 1, ceil_div(M, limits.num_sms)  # of a multiprocessor
    while 2 * ways <= most_ways and 2 * ways * threads * tokens <= spec.WALK_BLOCK:
        ways *= 2
    size = 4 * cap * (2 + threads // 32) + (4 * ways * K if ways > 1 or kind == "e4m3" else 0)
    return WalkPlan(threads, ways, cap, size)


def takes_walk(M: int, N: int, K: int, limits: Limits, kind: str = "bf16") -> bool:
    """Whether the walks take `M` tokens on this device; `kind` as in `plan_walk`."""
    if not 1 <= M <= min(_MOST_TOKENS, heavy_window(_MOST_TOKENS, N, K)):
        return False
    return plan_walk(M, N, K, limits, kind).smem_bytes + STATIC_SMEM <= limits.smem_bytes


def suits_walk(M: int, N: int, density: float | None) -> bool:
    """Whether a walk is the fastest by the rule; `density` None: it is not known."""
    return M * N * (USUAL_DENSITY if density is None else density) <= MOST_PAIRS


def walk_gate_ffn(kernels: KernelSet, limits: Limits, x: Tensor, ffn: FFN) -> Tensor:
    """`[M, K]` to `[M, K]`, bf16, contiguous, of what `takes_walk`: behind torch's gate product.

    The three weights of `ffn` are bf16, or e4m3 with their scales; K and N multiples of 128 then.
    """
    M, N, K, kind = len(x), ffn.N, ffn.K, kind_of(ffn.w_gate)
    values, token_scales = x, None
    if kind == "e4m3":
        rows = quantise_inputs(kernels, x)
        values, token_scales, heavy_count = rows.values, rows.token_scales, rows.heavy_count
        weight = Fp8Weight(ffn.w_gate, ffn.s_gate[:, None], ffn.b_gate)
        gate = rounded_product(values, rows.scales, weight, x.dtype)
    else:
        heavy_count = torch.zeros(1, dtype=torch.int32, device=x.device)
        gate = F.linear(x, ffn.w_gate, ffn.b_gate)
    plan = plan_walk(M, N, K, limits, kind)
    y, x_rows = torch.empty_like(x), torch.empty_like(values)
    heavy = Heavy(heavy_count.new_empty(M), heavy_count)
    kernels.launch(
        spec.entry("walk_gate", kind),
        (M,),
        plan.threads * plan.ways,
        (
            *(values, ffn.w_up, ffn.w_down, ffn.b_up, ffn.b_down),
            *(gate, N, K, plan.cap, plan.ways),
            *(heavy.rows, heavy.count, x_rows, y, token_scales, ffn.s_up, ffn.s_down),
        ),
        plan.smem_bytes,
        overlap=True,
    )
    given = values, ffn, (gate,), heavy, y, token_scales
    heavy = launch_heavy_walk(kernels, limits, *given, overlap=True)
    w_down = widened(kernels, limits, ffn, heavy, overlap=True)
    given = x_rows, x.new_empty(M, N), ffn, w_down, y, heavy, token_scales
    launch_heavy(kernels, limits, *given, overlap=True)
    return y
