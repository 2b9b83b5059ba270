"""The gated FFN for some hundred tokens on Hopper: each token walks through what fired for it.

    torch's gate product -> walk_gate -> the heavy rows

Over e4m3 weights inputs are rounded to e4m3 before, with a scale for each row (quantise_inputs). h
is bf16, as with few tokens.

Its time goes by pairs (token, neuron that fired). With few of them it is shorter than that of the
lists of twell_sequence.py. The kernels behind the gate may start before the one in front has ended;
they read nothing before that. What they do stands in kernels/ffn/walk.cuh and heavy.cuh.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from .twell_e4m3 import quantise_inputs
from .twell_fp8 import Fp8Weight, rounded_product
from .twell_heavy import Heavy, launch_heavy, launch_heavy_walk, widened
from .twell_launch import KernelSet
from .twell_plan import STATIC_SMEM, Limits, ceil_div, heavy_window, hopper_cap, round_up
from .twell_spec import E4M3_END, WALK_BATCH, WALK_BLOCK
from .twell_weights import FFN, end_of

# beside those of the lists
WALK_KERNELS = ("walk_gate", "heavy_walk_gate")
WALK_E4M3_KERNELS = ("quantise_inputs", *(f"{name}{E4M3_END}" for name in WALK_KERNELS))
MOST_PAIRS = 80_000  # as found on an H200
USUAL_DENSITY = 0.01  # where no profile tells it
_MOST_TOKENS = 4096
_MOST_OF_A_WAY = 512  # threads
_MOST_WAYS = {"": 4, E4M3_END: 8}  # at a time
_MOST_CAP = 512  # pairs of a token


@dataclass(frozen=True)
class WalkPlan:
    """Sizes of `walk_gate`."""

    threads: int  # of a way
    ways: int
    cap: int  # pairs that a token may have; beyond, its row is heavy
    smem_bytes: int


@lru_cache(maxsize=4096)
def plan_walk(M: int, N: int, K: int, limits: Limits, end: str = "") -> WalkPlan:
    """For M tokens, N neurons and inputs of K; `end` E4M3_END: over such weights."""
    chunks = ceil_div(K, 16 if end else 8)
    threads = round_up(ceil_div(chunks, ceil_div(chunks, _MOST_OF_A_WAY)), 32)
    cap = min(hopper_cap(N), _MOST_CAP)
    most_ways = min(_MOST_WAYS[end], cap // WALK_BATCH)
    ways, tokens = 1, ceil_div(M, limits.num_sms)  # of a multiprocessor
    while 2 * ways <= most_ways and 2 * ways * threads * tokens <= WALK_BLOCK:
        ways *= 2
    size = 4 * cap * (2 + threads // 32) + (4 * ways * K if ways > 1 or end else 0)
    return WalkPlan(threads, ways, cap, size)


def takes_walk(M: int, N: int, K: int, limits: Limits, end: str = "") -> bool:
    """Whether the walks take `M` tokens on this device; `end` as in `plan_walk`."""
    if not 1 <= M <= min(_MOST_TOKENS, heavy_window(_MOST_TOKENS, N, K)):
        return False
    return plan_walk(M, N, K, limits, end).smem_bytes + STATIC_SMEM <= limits.smem_bytes


def suits_walk(M: int, N: int, density: float | None) -> bool:
    """Whether a walk is the fastest by the rule; `density` None: it is not known."""
    return M * N * (USUAL_DENSITY if density is None else density) <= MOST_PAIRS


def walk_gate_ffn(kernels: KernelSet, limits: Limits, x: Tensor, ffn: FFN) -> Tensor:
    """`[M, K]` to `[M, K]`, bf16, contiguous, of what `takes_walk`: behind torch's gate product.

    The three weights of `ffn` are bf16, or e4m3 with their scales; K and N multiples of 128 then.
    """
    M, N, K, end = len(x), ffn.N, ffn.K, end_of(ffn.w_gate)
    values, token_scales = x, None
    if end:
        rows = quantise_inputs(kernels, x)
        values, token_scales, heavy_count = rows.values, rows.token_scales, rows.heavy_count
        weight = Fp8Weight(ffn.w_gate, ffn.s_gate[:, None], ffn.b_gate)
        gate = rounded_product(values, rows.scales, weight, x.dtype)
    else:
        heavy_count = torch.zeros(1, dtype=torch.int32, device=x.device)
        gate = F.linear(x, ffn.w_gate, ffn.b_gate)
    plan = plan_walk(M, N, K, limits, end)
    y, x_rows = torch.empty_like(x), torch.empty_like(values)
    heavy = Heavy(heavy_count.new_empty(M), heavy_count)
    kernels.launch(
        f"walk_gate{end}",
        (M,),
        plan.threads * plan.ways,
        (
            *(values, ffn.w_up, ffn.w_down, ffn.b_up, ffn.b_down),
            *(gate, N, K, plan.cap, plan.ways),
            *(heavy.rows, heavy.count, x_rows, y),
            *((token_scales, ffn.s_up, ffn.s_down) if end else ()),
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
