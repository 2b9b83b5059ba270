"""The gated FFN and a linear layer for few tokens, 1 to 64: bound by how fast weights stream in.

    few_ffn:     few_hidden (gate product, what fires, up of that)  ->  few_down
    few_dense:   few_gated (gate and up)                            ->  few_linear
    few_linear:  one product

Nothing is read back by the host, so a CUDA graph can hold it all. What the kernels do stands in
kernels/few.cuh and in their heads; their sizes are repeated here and nowhere else.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .twell_launch import KernelSet, Limits
from .twell_plan import ceil_div
from .twell_weights import FFN

FEW_TOKENS = 64
_BLOCK, _WARPS = 256, 8
_ROWS = 16  # of a row block
_DOWN_COLUMNS = 16
_DOWN_STAGES, _WIDE_TILES = 3, 4
# of few::Sizes by octets of tokens: row blocks in a pass, passes, stages of a warp, halves
_PASS = {1: (1, 4, 5, 2), 2: (1, 3, 4, 2), 4: (1, 3, 3, 2), 8: (3, 1, 2, 1)}
_HIDDEN_PASS = {**_PASS, 1: (1, 4, 4, 2)}
_GATED_PASS = {1: (2, 2, 3, 2), 2: (2, 2, 3, 2), 4: (4, 1, 1, 2), 8: (2, 1, 2, 1)}


@dataclass(frozen=True)
class FewSizes:
    """For `M` tokens and `N` neurons: octets of tokens, and kernels' shared memory in bytes."""

    octets: int
    linear: int
    gated: int
    hidden: int
    down: int


def few_sizes(M: int, N: int, capability: tuple[int, int]) -> FewSizes:
    """Sizes for 1 to FEW_TOKENS tokens on a device of this compute capability."""
    octets = next(o for o in _PASS if 8 * o >= M)
    linear = _product_bytes(octets, *_PASS[octets])
    tiles = _WIDE_TILES if _is_wide(M) and capability >= (9, 0) else 1
    stages = _DOWN_STAGES * (512 * tiles + 256 * max(octets, 2))
    return FewSizes(
        octets,
        linear,
        _product_bytes(octets, *_GATED_PASS[octets]),
        _product_bytes(octets, *_HIDDEN_PASS[octets]) + 160 + 260 * 8 * octets,
        ceil_div(2 * N, 16) * 16 + _WARPS * max(stages, 512 * tiles * octets),
    )


def few_kernels(M: int) -> tuple[str, str, str, str]:
    """The entries for `M` tokens: few_linear, few_gated, few_hidden, few_down."""
    octets = next(o for o in _PASS if 8 * o >= M)
    down = f"few_down_wide_{octets}" if _is_wide(M) else "few_down"
    return f"few_linear_{octets}", f"few_gated_{octets}", f"few_hidden_{octets}", down


def few_ffn_kernels(limits: Limits) -> tuple[str, ...]:
    """All entries that `few_ffn` launches on this device."""
    taken = (M for M in range(1, FEW_TOKENS + 1) if takes_few(M, 8, limits))
    return tuple(dict.fromkeys(name for M in taken for name in few_kernels(M)[2:]))


def takes_few(M: int, N: int, limits: Limits) -> bool:
    """Whether `few_ffn` takes `M` tokens on this device."""
    if not 1 <= M <= FEW_TOKENS:
        return False
    sizes = few_sizes(M, N, limits.capability)
    return max(sizes.hidden, sizes.down) <= limits.smem_bytes


def takes_few_dense(M: int, limits: Limits) -> bool:
    """Whether `few_gated` and `few_linear` do; of how many neurons makes no difference."""
    if not 1 <= M <= FEW_TOKENS:
        return False
    sizes = few_sizes(M, 0, limits.capability)
    return max(sizes.gated, sizes.linear) <= limits.smem_bytes


def _is_wide(M: int) -> bool:
    return M > 2


def _product_bytes(octets: int, at_once: int, passes: int, stages: int, halves: int) -> int:
    """few.cuh: Sizes::kBytes."""
    ring = stages * (2 * at_once + octets) * 512 * halves
    return _WARPS * (ring + passes * at_once * octets * 512)


def few_ffn(
    kernels: KernelSet,
    limits: Limits,
    x: Tensor,
    ffn: FFN,
    *,
    residual: Tensor | None = None,
    counts: Tensor | None = None,
    overlap: bool = False,
) -> Tensor:
    """`[M, K]` to `[M, K]`, M from 1 to FEW_TOKENS, bf16, contiguous.

    `residual` `[M, K]` is added to the rounded result. `counts` int32 `[M]` is raised by how many
    neurons fired for each token. `overlap` as in `KernelSet.launch`: weights must not change then.
    """
    M, N, K = x.shape[0], ffn.N, ffn.K
    sizes = few_sizes(M, N, limits.capability)
    blocks = ceil_div(N, _ROWS)
    hidden = x.new_empty(N, 8 * sizes.octets)
    fired = torch.empty(blocks, dtype=torch.int16, device=x.device)
    kernels.launch(
        few_kernels(M)[2],
        (min(blocks, limits.num_sms),),
        _BLOCK,
        (
            *(x, ffn.w_gate, ffn.w_up, ffn.w_down, ffn.b_gate, ffn.b_up, float(ffn.threshold)),
            *(M, N, K, hidden, fired, counts),
        ),
        sizes.hidden,
        overlap=overlap,
    )
    y = torch.empty_like(x)
    kernels.launch(
        few_kernels(M)[3],
        (K // _DOWN_COLUMNS,),
        _BLOCK,
        (ffn.w_down, hidden, fired, ffn.b_down, residual, M, N, K, y),
        sizes.down,
        overlap=overlap,
    )
    return y


def few_linear(
    kernels: KernelSet,
    limits: Limits,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    overlap: bool = False,
) -> Tensor:
    """`x W^T + b (+ residual)`: `[M, K]` and `[N, K]` to `[M, N]`, M from 1 to FEW_TOKENS, bf16."""
    M, (N, K) = x.shape[0], weight.shape
    sizes = few_sizes(M, N, limits.capability)
    y = x.new_empty(M, N)
    kernels.launch(
        few_kernels(M)[0],
        (min(ceil_div(N, _ROWS), limits.num_sms),),
        _BLOCK,
        (x, weight, bias, residual, M, N, K, y),
        sizes.linear,
        overlap=overlap,
    )
    return y


def few_gated(
    kernels: KernelSet, limits: Limits, x: Tensor, ffn: FFN, *, overlap: bool = False
) -> Tensor:
    """The hidden state `[M, N]` of the dense form: gate and up in one kernel."""
    M, N, K = x.shape[0], ffn.N, ffn.K
    sizes = few_sizes(M, N, limits.capability)
    hidden = x.new_empty(M, N)
    kernels.launch(
        few_kernels(M)[1],
        (min(ceil_div(N, _ROWS), limits.num_sms),),
        _BLOCK,
        (
            *(x, ffn.w_gate, ffn.w_up, ffn.b_gate, ffn.b_up, float(ffn.threshold)),
            *(M, N, K, hidden),
        ),
        sizes.gated,
        overlap=overlap,
    )
    return hidden
