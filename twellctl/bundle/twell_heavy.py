"""Heavy rows on Hopper, densely: tokens with too many neurons for a walk or the lists.

    heavy_gather -> heavy_hidden -> heavy_down        of e4m3 weights W_down is widened before

Which rows those are only the device knows, so each window of tokens is launched, and one without a
heavy row returns at once. So do all where they are few and twell_heavy_walk.py has had them. The
kernels stand in heavy.cu and heavy_e4m3.cu.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from .twell_launch import KernelSet, tensor_map
from .twell_plan import HEAVY_SMEM, Limits, heavy_window, product_grid
from .twell_spec import (
    E4M3_END,
    GATHER_BLOCK,
    INPUT_BOX_ROWS,
    PRODUCT_BLOCK,
    PRODUCT_INNER,
    WEIGHT_BOX_ROWS,
)
from .twell_weights import FFN


@dataclass(frozen=True)
class Heavy:
    """Which rows heavy.cuh has: `count` of the list `rows` from `start` on, or all.

    No row if `count` is at most `few`.
    """

    rows: Tensor | None = None
    count: Tensor | None = None
    few: int = 0
    start: int = 0


def heavy_products(
    kernels: KernelSet,
    limits: Limits,
    x: Tensor,
    y: Tensor,
    ffn: FFN,
    heavy: Heavy,
    *,
    training: bool = False,
) -> None:
    """The rows that `plan` left out, densely. Windows behind the device's count return at once.

    `training`: smaller windows.
    """
    M, N, K = x.shape[0], ffn.N, ffn.K
    window = heavy_window(M, N, K, training=training)
    x_rows, hidden = x.new_empty(window, K), x.new_empty(window, N)
    for part in _gathered(kernels, limits, x, ffn, heavy, x_rows):
        launch_heavy(kernels, limits, x_rows, hidden, ffn, y, part)


def _gathered(
    kernels: KernelSet,
    limits: Limits,
    x: Tensor,
    ffn: FFN,
    heavy: Heavy,
    x_rows: Tensor,
) -> Iterator[Heavy]:
    """Window by window the listed rows of `x`, which lie in `x_rows` `[window, K]` then."""
    window = len(x_rows)
    for start in range(0, len(x), window):
        kernels.launch(
            "heavy_gather",
            (min(window, 4 * limits.num_sms),),
            GATHER_BLOCK,
            (x, heavy.rows, heavy.count, heavy.few, start, window, ffn.shorts, x_rows),
        )
        yield replace(heavy, start=start)


def launch_heavy(
    kernels: KernelSet,
    limits: Limits,
    rows: Tensor,
    hidden: Tensor,
    ffn: FFN,
    y: Tensor,
    heavy: Heavy,
    *,
    overlap: bool = False,
) -> None:
    """`heavy` rows of `y` from `rows` `[window, K]`, by way of `hidden` `[window, N]`."""
    launch_heavy_hidden(kernels, limits, rows, ffn, heavy, hidden, overlap=overlap)
    (window, N), K = hidden.shape, ffn.K
    kernels.launch(
        "heavy_down",
        (product_grid(window, K, limits.num_sms),),
        PRODUCT_BLOCK,
        (
            *(tensor_map(hidden, INPUT_BOX_ROWS), tensor_map(ffn.w_down, PRODUCT_INNER)),
            *(ffn.b_down, heavy.rows, heavy.count, heavy.few, heavy.start, window, N, K, y),
        ),
        HEAVY_SMEM,
        overlap=overlap,
    )


def launch_heavy_hidden(
    kernels: KernelSet,
    limits: Limits,
    rows: Tensor,
    ffn: FFN,
    heavy: Heavy,
    hidden: Tensor,
    *,
    overlap: bool = False,
) -> None:
    """gate and up of `rows` in one product, into `hidden`."""
    M, N = hidden.shape
    weights = (tensor_map(t, WEIGHT_BOX_ROWS) for t in (ffn.w_gate, ffn.w_up))
    kernels.launch(
        "heavy_hidden",
        (product_grid(M, 2 * N, limits.num_sms),),
        PRODUCT_BLOCK,
        (
            *(tensor_map(rows, INPUT_BOX_ROWS), *weights, ffn.b_gate, ffn.b_up),
            *(heavy.count, heavy.few, heavy.start, M, N, ffn.K, hidden),
        ),
        HEAVY_SMEM,
        overlap=overlap,
    )


def heavy_e4m3_products(
    kernels: KernelSet,
    limits: Limits,
    values: Tensor,
    token_scales: Tensor,
    y: Tensor,
    ffn: FFN,
    heavy: Heavy,
) -> None:
    """The rows that `plan` left out, densely. Windows behind the device's count return at once."""
    M, N, K = values.shape[0], ffn.N, ffn.K
    window = heavy_window(M, N, K)
    x_rows, hidden = values.new_empty((window, K)), y.new_empty((window, N))
    wide = widen(kernels, limits, ffn, heavy)
    for part in _gathered(kernels, limits, values, ffn, heavy, x_rows):
        launch_heavy_e4m3(kernels, limits, x_rows, token_scales, hidden, wide, ffn, y, part)


def widen(
    kernels: KernelSet, limits: Limits, ffn: FFN, heavy: Heavy, *, overlap: bool = False
) -> Tensor:
    """W_down `[N, K]` in bf16, without its scales, if more than few rows are `heavy`."""
    wide = torch.empty_like(ffn.w_down, dtype=torch.bfloat16)
    args = ffn.w_down, np.int64(ffn.w_down.numel()), heavy.count, heavy.few, wide
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
    listed = heavy.rows, heavy.count, heavy.few, heavy.start, window
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
