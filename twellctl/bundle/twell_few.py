"""The gated FFN and a linear layer for few tokens, 1 to 64: bound by how fast weights stream in.

    few_pairs:   the gate product -> few_walk, where few neurons fire, on Hopper (twell_few_walk.py)
    few_union:   few_hidden (gate product, what fires, up of that)  ->  few_down
    few_gated:   gate and up of the dense form
    few_linear:  one product

Nothing is read back by the host, so a CUDA graph can hold it all. What the kernels do stands in
kernels/tile/few_product.cuh and in their heads; their sizes are repeated here and nowhere else.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from .twell_few_walk import (
    FEW_WALK_KERNELS,
    LINEAR_TOKENS,
    few_walk_kernels,
    launch_few_walk,
)
from .twell_launch import KernelSet, Limits
from .twell_plan import ceil_div
from .twell_weights import FFN

FEW_TOKENS = 64
_BLOCK, _WARPS = 256, 8
_ROWS = 16  # of a row block
_DOWN_COLUMNS = 16
_DOWN_STAGES, _WIDE_TILES = 4, 4
_DOWN_STATIC = 32  # bytes of shared memory that few_down declares; the other kernels have none
_DOWN_LISTED = 2048  # neurons that few_down lists at a time
# of few::Sizes by octets of tokens: row blocks in a pass, passes, stages of a warp, halves; as the
# kernels are built for GPUs with much shared memory, and with little
_PASS = {1: (1, 3, 5, 2), 2: (1, 3, 4, 2), 4: (1, 3, 3, 2), 8: (3, 1, 2, 1)}
_SHORT_PASS = {1: (1, 3, 4, 2)}
_AHEAD_PASS = {1: (1, 3, 7, 2), 2: (1, 3, 6, 2)}
_GATED_PASS = {1: (2, 2, 3, 2), 2: (2, 2, 3, 2), 4: (4, 1, 1, 2), 8: (2, 1, 2, 1)}
_SMALL_PASS = {1: (1, 3, 3, 2), 2: (1, 1, 2, 2), 4: (1, 1, 1, 2), 8: (1, 1, 1, 1)}
_SMALL_GATED_PASS = {1: (2, 1, 2, 2), 2: (2, 1, 1, 2), 4: (2, 1, 1, 2), 8: (2, 1, 1, 1)}
_STAYING = (1, 2)  # octets of which x may stay in shared memory
_ANY_LENGTH = 1 << 20  # of x: too long to stay


@dataclass(frozen=True)
class Launch:
    """An entry, and its dynamic shared memory in bytes."""

    name: str
    smem_bytes: int


@dataclass(frozen=True)
class FewPlan:
    """The launches for so many tokens."""

    octets: int
    linear: Launch
    ahead: Launch  # the same product, with more weights under way before it may begin
    gated: Launch
    hidden: Launch
    down: Launch


@lru_cache(maxsize=4096)
def plan_few(M: int, N: int, K: int, limits: Limits) -> FewPlan:
    """For 1 to FEW_TOKENS tokens, N neurons (or outputs) and inputs of K."""
    octets = _octets(M)
    at_hand = 160 + 260 * 8 * octets
    kilobytes = _shared_kb(limits.capability)
    passes = _PASS if kilobytes >= (163 if octets <= 2 else 227) else _SMALL_PASS
    gated_passes = _GATED_PASS if kilobytes >= (163 if octets == 1 else 227) else _SMALL_GATED_PASS
    return FewPlan(
        octets,
        _linear(M, N, K, passes, False, limits),
        _linear(M, N, K, passes, True, limits),
        _product("few_gated", M, K, octets, gated_passes, 32 * octets, limits),
        _product("few_hidden", M, K, octets, passes, at_hand, limits),
        _down(octets, N, M > 2, limits),
    )


def _octets(M: int) -> int:
    return next(octets for octets in _PASS if 8 * octets >= M)


def _down(octets: int, N: int, wide: bool, limits: Limits) -> Launch:
    """few_down.cu: Down::kBytes, and its list."""
    tiles = _WIDE_TILES if wide and limits.capability >= (9, 0) else 1
    stages = _DOWN_STAGES * (512 * tiles + 256 * max(octets, 2))
    listed = N if wide else min(N, _DOWN_LISTED)
    smem_bytes = ceil_div(2 * listed, 16) * 16 + _WARPS * max(stages, 512 * tiles * octets)
    return Launch(f"few_down_wide_{octets}" if wide else "few_down", smem_bytes)


def _shared_kb(capability: tuple[int, int]) -> int:
    """few.cuh: TWELL_SHARED_KB."""
    if (9, 0) <= capability < (12, 0):
        return 227
    return 163 if capability in ((8, 0), (8, 7)) else 99


def _linear(
    M: int,
    N: int,
    K: int,
    passes: dict[int, tuple[int, int, int, int]],
    ahead: bool,
    limits: Limits,
) -> Launch:
    """few_linear: as _product, or where there is much shared memory another of its builds."""
    octets = _octets(M)
    plain = _product("few_linear", M, K, octets, passes, 0, limits)
    kind, others = ("ahead", _AHEAD_PASS) if ahead else ("short", _SHORT_PASS)
    if _shared_kb(limits.capability) < 227 or octets not in others:
        return plain
    row_blocks = max(1, ceil_div(ceil_div(N, _ROWS), limits.num_sms))
    wanted = row_blocks * ceil_div(K, 64 * _WARPS)  # stages that hold all of a block's weights
    if wanted <= passes[octets][2] if ahead else wanted > others[octets][2]:
        return plain
    other = _product("few_linear", M, K, octets, others, 0, limits)
    if "long" in other.name:
        return plain
    return Launch(f"{other.name}_{kind}", other.smem_bytes)


def _product(
    kernel: str,
    M: int,
    K: int,
    octets: int,
    passes: dict[int, tuple[int, int, int, int]],
    more_bytes: int,
    limits: Limits,
) -> Launch:
    """few.cuh: kBytes and x_bytes of its Sizes. x stays if that fits."""
    at_once, num_passes, stages, halves = passes[octets]
    sums = num_passes * at_once * octets * 512
    if octets in _STAYING:
        x = _WARPS * ceil_div(K, 32 * halves * _WARPS) * M * 64 * halves
        size = _WARPS * (stages * 2 * at_once * 512 * halves + sums) + x + more_bytes
        if size <= limits.smem_bytes:
            return Launch(f"{kernel}_{octets}", size)
    size = _WARPS * (stages * (2 * at_once + octets) * 512 * halves + sums) + more_bytes
    return Launch(f"{kernel}_{octets}" + "_long" * (octets in _STAYING), size)


def few_kernels(M: int, limits: Limits) -> tuple[str, ...]:
    """All entries of the FFN for `M` tokens here: products, of inputs of any length, and down."""
    few_down = ("few_down",) if M <= 2 else ()
    return (*_entries(_octets(M)), *few_down, *few_walk_kernels(M, limits))


def _entries(octets: int) -> tuple[str, ...]:
    """The builds for so many octets of tokens."""
    names = _products(octets, "few_linear", "few_hidden")
    short = [f"few_linear_{octets}_short"] if octets in _SHORT_PASS else []
    ahead = [f"few_linear_{octets}_ahead"] if octets in _AHEAD_PASS else []
    return (*names, *short, *ahead, f"few_down_wide_{octets}")


def _products(octets: int, *kernels: str) -> list[str]:
    names = [f"{kernel}_{octets}" for kernel in kernels]
    return names + ([f"{name}_long" for name in names] if octets in _STAYING else [])


# all entries of the FFN for few tokens, on any device
FEW_KERNELS = (
    *(entry for octets in _PASS for entry in _entries(octets)),
    "few_down",
    *FEW_WALK_KERNELS,
)


def few_gated_kernels(M: int) -> tuple[str, ...]:
    """The entries of `few_gated`, which the decode engine alone launches: no export has them."""
    return tuple(_products(_octets(M), "few_gated"))


def few_ffn_kernels(limits: Limits) -> tuple[str, ...]:
    """All entries of the FFN for few tokens on this device."""
    taken = (M for M in (2, 8, 16, 32, 64) if takes_few(M, 8, limits))
    return tuple(dict.fromkeys(name for M in taken for name in few_kernels(M, limits)))


def takes_few(M: int, N: int, limits: Limits) -> bool:
    """Whether `few_union` takes `M` tokens of any length on this device."""
    if not 1 <= M <= FEW_TOKENS:
        return False
    plan = plan_few(M, N, _ANY_LENGTH, limits)
    return _fits(limits, plan.hidden, plan.down)


def takes_few_dense(M: int, limits: Limits) -> bool:
    """Whether `few_gated` and `few_linear` take `M` inputs, of any length."""
    if not 1 <= M <= FEW_TOKENS:
        return False
    plan = plan_few(M, 0, _ANY_LENGTH, limits)
    return _fits(limits, plan.linear, plan.gated)


def _fits(limits: Limits, *launches: Launch) -> bool:
    return all(launch.smem_bytes + _static(launch.name) <= limits.smem_bytes for launch in launches)


def _static(name: str) -> int:
    return _DOWN_STATIC if name.startswith("few_down") else 0


def few_union(
    kernels: KernelSet,
    limits: Limits,
    x: Tensor,
    ffn: FFN,
    *,
    residual: Tensor | None = None,
    counts: Tensor | None = None,
    overlap: bool = False,
) -> Tensor:
    """`[M, K]` to `[M, K]`, M from 1 to FEW_TOKENS, bf16, contiguous: over all that fires.

    `residual` `[M, K]` is added to the rounded result. `counts` int32 `[M]` is raised by how many
    neurons fired for each token. `overlap` as in `KernelSet.launch`: weights must not change then.
    """
    M, N, K = x.shape[0], ffn.N, ffn.K
    plan = plan_few(M, N, K, limits)
    blocks = ceil_div(N, _ROWS)
    hidden = x.new_empty(N, 8 * plan.octets)
    fired = torch.empty(ceil_div(blocks, 2) * 2, dtype=torch.int16, device=x.device)
    kernels.launch(
        plan.hidden.name,
        (min(blocks, limits.num_sms),),
        _BLOCK,
        (
            *(x, ffn.w_gate, ffn.w_up, ffn.w_down, ffn.b_gate, ffn.b_up, M, N, K),
            *(hidden, fired, counts),
        ),
        plan.hidden.smem_bytes,
        overlap=overlap,
    )
    y = torch.empty_like(x)
    kernels.launch(
        plan.down.name,
        (K // _DOWN_COLUMNS,),
        _BLOCK,
        (ffn.w_down, hidden, fired, ffn.b_down, residual, M, N, K, y),
        plan.down.smem_bytes,
        overlap=overlap,
    )
    return y


def few_pairs(
    kernels: KernelSet,
    limits: Limits,
    x: Tensor,
    ffn: FFN,
    *,
    residual: Tensor | None = None,
    counts: Tensor | None = None,
    overlap: bool = False,
) -> Tensor:
    """The same for what `takes_few_walk`: each token over what fires for it."""
    if by_linear := x.shape[0] <= LINEAR_TOKENS:
        gate = few_linear(kernels, limits, x, ffn.w_gate, ffn.b_gate, overlap=overlap)
    else:
        gate = F.linear(x, ffn.w_gate, ffn.b_gate)
    how = {"residual": residual, "counts": counts, "overlap": by_linear}
    return launch_few_walk(kernels, limits, x, gate, ffn, **how)


def few_linear(
    kernels: KernelSet,
    limits: Limits,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    wide: bool = False,
    ahead: bool = False,
    overlap: bool = False,
) -> Tensor:
    """`x W^T + b (+ residual)`: `[M, K]` and `[N, K]` to `[M, N]`, M from 1 to FEW_TOKENS, bf16.

    `wide`: the result is float32, not rounded, and there is no `residual`. `ahead`: it overlaps
    short kernels that leave shared memory for more of its weights. The result is the same.
    """
    M, (N, K) = x.shape[0], weight.shape
    plan = plan_few(M, N, K, limits)
    y = x.new_empty(M, N, dtype=torch.float32 if wide else x.dtype)
    launch = plan.ahead if ahead else plan.linear
    kernels.launch(
        launch.name,
        (min(ceil_div(N, _ROWS), limits.num_sms),),
        _BLOCK,
        (x, weight, bias, residual, M, N, K, *((None, y) if wide else (y, None))),
        launch.smem_bytes,
        overlap=overlap,
    )
    return y


def few_gated(
    kernels: KernelSet,
    limits: Limits,
    x: Tensor,
    ffn: FFN,
    *,
    counts: Tensor | None = None,
    overlap: bool = False,
) -> Tensor:
    """The dense hidden state, `[M, K]` to `[M, N]`; `counts` as in `few_union`."""
    M, N, K = x.shape[0], ffn.N, ffn.K
    plan = plan_few(M, N, K, limits)
    hidden = x.new_empty(M, N)
    kernels.launch(
        plan.gated.name,
        (min(ceil_div(N, _ROWS), limits.num_sms),),
        _BLOCK,
        (x, ffn.w_gate, ffn.w_up, ffn.b_gate, ffn.b_up, M, N, K, hidden, counts),
        plan.gated.smem_bytes,
        overlap=overlap,
    )
    return hidden
