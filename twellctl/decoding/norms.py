"""RMSNorm and what stands beside it between the blocks of a layer, over our own kernels: rows `[B,
K]` in bf16, contiguous, on one device. How they are rounded stands in kernels/decode/norm.cu.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from twellctl.bundle import twell_spec as spec
from twellctl.bundle.twell_launch import KernelSet

LONGEST_ROW = 32 * spec.NORM_WARPS * spec.NORM_PARTS * 8  # K
MOST_STATES = 32  # that join_norms finds one among: a lane looks at each


def why_no_norm(K: int) -> str | None:
    """None if the kernels take rows of K, else a sentence."""
    if K % 8 or K > LONGEST_ROW:
        return f"the norm kernel takes rows of a multiple of 8 up to {LONGEST_ROW}, not of {K}"
    return None


def rms_norm(
    kernels: KernelSet, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    """RMSNorm over the rows of `x` `[B, K]`; into `out`, whose rows lie as those of `x`, and which
    may be `x`."""
    B, K = x.shape
    if reason := why_no_norm(K):
        raise ValueError(reason)
    y = torch.empty_like(x) if out is None else out
    args = {"x": x, "weight": weight, "eps": eps, "K": K, "stride": x.stride(0), "y": y}
    kernels.launch("rms_norm", (B,), _norm_block(K), args, overlap=True)
    return y


def add_norm(
    kernels: KernelSet, z: Tensor, weight_of_z: Tensor, x: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """`x` `[B, K]` with the RMSNorm of `z` added, and the RMSNorm of that; without a `weight` the
    sum itself."""
    B, K = x.shape
    total, y = torch.empty_like(x), None if weight is None else torch.empty_like(x)
    kernels.launch(
        "add_norm",
        (B,),
        _norm_block(K),
        {
            "z": z,
            "weight_of_z": weight_of_z,
            "x": x,
            "weight": weight,
            "eps": eps,
            "K": K,
            "sum": total,
            "y": y,
        },
        overlap=True,
    )
    return total, total if y is None else y


def embed_norm(
    kernels: KernelSet,
    tokens: Tensor,
    table: Tensor,
    weight: Tensor | None,
    eps: float,
    counts: Tensor | None = None,
    *,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Rows of `table` `[V, K]` by int32 `tokens` `[B]`, times `scale`, and their RMSNorm; both
    `[B, K]`. Without a `weight` the rows themselves.

    It begins a step: int32 `counts` are set to 0. Tokens are not checked.
    """
    (B,), K = tokens.shape, table.shape[1]
    x, y = table.new_empty(2, B, K)
    kernels.launch(
        "embed_norm",
        (B,),
        _norm_block(K),
        {
            "tokens": tokens,
            "table": table,
            "scale": scale,
            "weight": table[0] if weight is None else weight,  # of what nobody uses
            "eps": eps,
            "K": K,
            "counts": counts,
            "num_counts": 0 if counts is None else counts.numel(),
            "x": x,
            "y": y,
        },
    )
    return x, x if weight is None else y


def join_norms(
    kernels: KernelSet,
    token: Tensor,
    table: Tensor,
    states: Tensor,
    weights: Tensor,
    eps: float,
    among: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`[1, 2 K]`: the RMSNorm of the row of `table` `[V, K]` that int32 `token` `[1]` names, which
    is not checked, and behind it that of one of `states` `[n, K]`. `weights` `[2, K]`: of both.

    `among`: the positions int32 `[n]` of the states, n up to `MOST_STATES`, and that of the token,
    `[1]`. The state is the first of the position before the token's; if there is none, and without
    `among`, the first of all.
    """
    K, n = table.shape[1], len(states)
    if among is not None and n > MOST_STATES:
        raise ValueError(f"the norm kernel finds one of up to {MOST_STATES} states, not of {n}")
    read, position = among or (None, None)
    y = table.new_empty(1, 2 * K)
    kernels.launch(
        "join_norms",
        (2,),
        _norm_block(K),
        {
            "token": token,
            "table": table,
            "states": states,
            "read": read,
            "num_read": 0 if read is None else n,
            "position": position,
            "weights": weights,
            "eps": eps,
            "K": K,
            "y": y,
        },
        overlap=True,
    )
    return y


def added(
    kernels: KernelSet,
    x: Tensor,
    block: Callable[..., Tensor],
    own_norm: Tensor | None,
    norm: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """`x` `[B, K]` with what a `block` computes, and the norm of that: what the next block takes.

    `own_norm`: of what the block computes itself. `block` takes a `residual`, or None, that is
    added to what it computes.
    """
    if own_norm is not None:
        return add_norm(kernels, block(residual=None), own_norm, x, norm, eps)
    x = block(residual=x)
    return x, rms_norm(kernels, x, norm, eps)


def normalise_q_and_k(
    kernels: KernelSet, qkv: Tensor, of_q: Tensor, of_k: Tensor, eps: float
) -> None:
    """All heads of each together, where they lie in `qkv` `[B, .]`."""
    q, k, _ = qkv.split((len(of_q), len(of_k), qkv.shape[1] - len(of_q) - len(of_k)), dim=1)
    rms_norm(kernels, q, of_q, eps, out=q)
    rms_norm(kernels, k, of_k, eps, out=k)


def _norm_block(K: int) -> int:
    return min(32 * spec.NORM_WARPS, -(-K // 256) * 32)
