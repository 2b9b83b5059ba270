"""The LM head in 8 bits, for steps in one kernel over int4 (kernels/decode/step_head.cuh), and the
logits of the bf16 head that are computed behind it.

A row w becomes a scale s times whole numbers c, each the nearest. Its rough logit differs from that
of the bf16 head by at most its error times the norm of x:

    |w - s c|           Cauchy and Schwarz, of what rounding the row loses
    |s c| X_LOST        the same, of what rounding x loses, and of fp32 where 64 numbers are added
    |w| K 2^-23         of the bf16 head, whose sums are in fp32 in any order: each of K additions
                        loses at most 2^-23 of the sum of absolute values

all of it times 1 + 2^-9 for the norm of x and for what is computed with the error, which are fp32,
plus 2^-60 for numbers that are too small for fp32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from twellctl.bundle.twell_few import product_bytes
from twellctl.bundle.twell_launch import KernelSet
from twellctl.bundle.twell_plan import ceil_div
from twellctl.bundle.twell_spec import FEW_WARPS, REFINE, STEP_QUAD, STEP_WARPS

MOST_CODE = 127
ROUGH_BYTES = 8  # of a row, beside a byte for each code
# 64 values of x that go together lose at most 1/32640 of the largest each (tile/nibbles.cuh), which
# is 8/32640 of their norm; the rest is for sums: 100 2^-24
X_LOST = 1 / 3900
_ROWS = 4096  # that are rounded at a time
_THREADS = 32 * FEW_WARPS


@dataclass(frozen=True)
class RoughHead:
    """`codes` int8 `[V, K]`, as step_head.cuh says where they lie; `scales` float32 `[V, 2]`, of
    each row the scale and the error. V is filled up to a multiple of STEP_QUAD: of rows behind the
    head's own nothing is known."""

    codes: Tensor
    scales: Tensor

    @classmethod
    def of(cls, head: Tensor) -> "RoughHead":
        """Of a head `[V, K]` in bf16. A row that is not finite has an infinite error."""
        V, K = head.shape
        rows = ceil_div(V, STEP_QUAD) * STEP_QUAD
        codes = torch.zeros(rows, K, dtype=torch.int8, device=head.device)
        scales = torch.zeros(rows, 2, dtype=torch.float32, device=head.device)
        scales[:, 1] = torch.inf
        for first in range(0, V, _ROWS):
            some = slice(first, min(first + _ROWS, V))
            numbers, scales[some] = rounded(head[some])
            codes[some] = laid(numbers)
        return cls(codes, scales)


def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 `[n, K]` of rows `[n, K]`, and float32 `[n, 2]`: scales and errors."""
    wide = rows.double()
    is_finite = wide.isfinite().all(1, keepdim=True)
    wide = wide.masked_fill(~is_finite, 0)
    scales = (wide.abs().amax(1, keepdim=True) / MOST_CODE).float()
    codes = (wide / scales).nan_to_num(0).round().clamp(-MOST_CODE, MOST_CODE)
    given = codes * scales
    lost, of_x, of_sums = ((v.norm(dim=1, keepdim=True)) for v in (wide - given, given, wide))
    error = (lost + X_LOST * of_x + wide.shape[1] * 2**-23 * of_sums) * (1 + 2**-9) + 2**-60
    error = error.float().nextafter(torch.tensor(torch.inf, device=rows.device))  # not below
    return codes.to(torch.int8), torch.cat([scales, error.masked_fill(~is_finite, torch.inf)], 1)


def laid(codes: Tensor) -> Tensor:
    """Codes `[n, K]` as they lie, from an even row on."""
    by_parity = codes.unflatten(1, (-1, 4, 2)).transpose(-1, -2)  # of eights
    blocks = by_parity.reshape(len(codes), -1, 2, 64)
    blocks[1::2] = blocks[1::2].flip(2)
    return blocks.flatten(1)


@dataclass(frozen=True)
class Estimate:
    """What a step says of the bf16 head's logits: `logits` float32 `[1, V]` that are near to them,
    `most` `[1, V]`, what they are at most, and `least`, what some of them are at least, of each
    warp of each block; and `x` bf16 `[1, K]`, whose product with the head they are."""

    logits: Tensor
    most: Tensor
    least: Tensor
    x: Tensor

    @classmethod
    def empty(cls, V: int, K: int, blocks: int, device: torch.device) -> "Estimate":
        logits, most = torch.empty(2, 1, V, dtype=torch.float32, device=device)
        least = torch.empty(blocks, STEP_WARPS, dtype=torch.float32, device=device)
        return cls(logits, most, least, torch.empty(1, K, dtype=torch.bfloat16, device=device))


def refine(kernels: KernelSet, head: Tensor, estimate: Estimate) -> None:
    """Put into the logits of `estimate` those of the bf16 `head` `[V, K]`, wherever they may be the
    largest (kernels/decode/refine.cu)."""
    V, K = head.shape
    kernels.launch(
        "refine",
        (ceil_div(V, _THREADS),),
        _THREADS,
        {
            "x": estimate.x,
            "head": head,
            "most": estimate.most,
            "least": estimate.least,
            "num_least": estimate.least.numel(),
            "V": V,
            "K": K,
            "logits": estimate.logits,
        },
        product_bytes(REFINE, 1, K),
        overlap=True,
    )
