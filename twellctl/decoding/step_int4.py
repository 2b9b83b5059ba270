"""Weights in int4 as the kernel of a whole step reads them (kernels/decode/step_codes.cuh).

Codes and scales are laid anew, none is rounded anew. `expand_quads` and `expand_neurons` make the
weight of them on the GPU (kernels/decode/expand_codes.cu).
"""

import torch
from torch import Tensor

from twellctl.bundle.twell_launch import KernelSet
from twellctl.bundle.twell_plan import ceil_div
from twellctl.bundle.twell_spec import STEP_QUAD

_BLOCK = 64  # columns of a row that lie together
_THREADS, _EIGHTS = 256, 1024  # of a block that expands codes


def by_quads(codes: Tensor, scales: Tensor, group: int) -> Tensor:
    """uint8 `[N / 4, bytes]`: of four rows each their codes, then their scales, by groups of
    `group`, of int8 codes `[N, K]` and bf16 scales `[N, K / G]`, G a multiple of `group`."""
    N, K = codes.shape
    rows = torch.arange(N, device=codes.device)
    laid = _packed(codes, rows % STEP_QUAD).view(N // STEP_QUAD, -1)
    behind = _for_groups(scales, K, group).contiguous().view(torch.uint8)
    return torch.cat([laid, behind.view(N // STEP_QUAD, -1)], 1)


def from_quads(laid: Tensor, K: int, group: int) -> tuple[Tensor, Tensor]:
    """The codes `[N, K]` and scales `[N, K / group]` that `by_quads` laid."""
    N = STEP_QUAD * len(laid)
    of_codes = STEP_QUAD * K // 2
    rows = torch.arange(N, device=laid.device)
    codes = _unpacked(laid[:, :of_codes].reshape(N, -1), rows % STEP_QUAD)
    return codes, laid[:, of_codes:].contiguous().view(torch.bfloat16).view(N, K // group)


def down_by_neurons(codes: Tensor, scales: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Of W_down's int8 codes `[K, N]` and bf16 scales `[K, N / G]`, G a multiple of `group`: uint8
    `[N, K / 2]`, the codes by neurons, and bf16 `[N / group, K]`, the scales."""
    N = codes.shape[1]
    quads = torch.arange(N, device=codes.device) // STEP_QUAD
    scales = _for_groups(scales, -(-N // group) * group, group)
    return _packed(codes.t(), quads % STEP_QUAD), scales.t().contiguous()


def from_neurons(laid: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The codes `[K, N]` and scales `[K, N / group]` that `down_by_neurons` laid."""
    quads = torch.arange(len(laid), device=laid.device) // STEP_QUAD
    return _unpacked(laid, quads % STEP_QUAD).t(), scales.t()


def expand_quads(kernels: KernelSet, laid: Tensor, K: int, group: int) -> Tensor:
    """The weight `[N, K]` in bf16 that `by_quads` laid; K a multiple of 256."""
    args = {"codes": laid, "group": group}
    return _expanded(kernels, "expand_quads", STEP_QUAD * len(laid), K, args)


def expand_neurons(kernels: KernelSet, laid: Tensor, scales: Tensor, group: int) -> Tensor:
    """W_down in bf16 by rows of neurons, `[N, K]`, that `down_by_neurons` laid; K as above."""
    args = {"codes": laid, "scales": scales, "group": group}
    return _expanded(kernels, "expand_neurons", len(laid), scales.shape[1], args)


def _expanded(kernels: KernelSet, name: str, rows: int, columns: int, args: dict) -> Tensor:
    weight = torch.empty(rows, columns, dtype=torch.bfloat16, device=args["codes"].device)
    args |= {"num_rows": rows, "columns": columns, "weight": weight}
    grid = (ceil_div(rows * columns // 8, _EIGHTS),)
    kernels.launch(name, grid, _THREADS, args)
    return weight


def _for_groups(scales: Tensor, num: int, group: int) -> Tensor:
    """The same scales for groups of `group` of `num` weights, which share a scale by more."""
    return scales.repeat_interleave(num // group // scales.shape[1], 1)


def _packed(codes: Tensor, swizzle: Tensor) -> Tensor:
    """uint8 `[R, C / 2]`: of two codes the even one in the upper half; block b of 64 of a row lies
    in place b ^ `swizzle` of the row."""
    nibbles = codes.to(torch.uint8) & 15
    blocks = (nibbles[:, 0::2] << 4 | nibbles[:, 1::2]).unflatten(1, (-1, _BLOCK // 2))
    return _moved(blocks, swizzle).flatten(1)


def _unpacked(laid: Tensor, swizzle: Tensor) -> Tensor:
    """int8 codes `[R, C]` that `_packed` packed."""
    both = _moved(laid.unflatten(1, (-1, _BLOCK // 2)), swizzle).flatten(1).view(torch.int8)
    return torch.stack([both >> 4, both << 4 >> 4], -1).flatten(1)


def _moved(blocks: Tensor, swizzle: Tensor) -> Tensor:
    """`blocks` `[R, B, bytes]`, of which the row's swizzle tells where each lies."""
    places = torch.arange(blocks.shape[1], device=blocks.device) ^ swizzle[:, None]
    return blocks.gather(1, places[..., None].expand_as(blocks))
