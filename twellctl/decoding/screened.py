"""Screened gates: a copy of W_gate in 4 bits tells which neurons may fire (step_screen.cuh)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from twellctl.bundle.twell_plan import ceil_div
from twellctl.bundle.twell_spec import FEW_ROWS

GROUP, SLAB = 32, 64
UNIT_BYTES = 576  # of 16 neurons and a slab
COPY_BITS = 8 * UNIT_BYTES / (FEW_ROWS * SLAB)  # of a weight, its scales with it


@dataclass(frozen=True)
class Screen:
    """Of one FFN: `copy` uint8 `[row blocks, K / 64, 576]`, `limits` float32 `[16 row blocks]`.

    The first `num_own` neurons have gates of their own. A screen that `is_open` lets all of them
    through: the gate is read whole.
    """

    copy: Tensor
    limits: Tensor
    num_own: int
    is_open: bool = False


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`[n, K]` in 4 bits: values 0 to 15, uint8 `[n, K / 32, 32]`, scales bf16 `[n, K / 32, 1]`.

    A value q is (q - 8) times its scale.
    """
    groups = weight.float().view(len(weight), weight.shape[1] // GROUP, GROUP)
    most = groups.abs().argmax(-1, keepdim=True)
    scales = (groups.gather(-1, most) / -8).bfloat16()
    safe = torch.where(scales == 0, 1, scales).float()
    return (groups / safe).round_().add_(8).clamp_(0, 15).nan_to_num_(8).byte(), scales


def copied(weight: Tensor) -> Tensor:
    """The weight that the copy stands for, float32 `[n, K]`."""
    values, scales = rounded(weight)
    return ((values.float() - 8) * scales.float()).view_as(weight)


def copied_input(x: Tensor) -> Tensor:
    """What x `[M, K]` is beside a copy, float32: 8 bits, by a scale for each group."""
    groups = x.float().view(len(x), x.shape[1] // GROUP, GROUP)
    most = groups.abs().amax(-1, keepdim=True)
    whole = (groups * torch.where(most > 0, 127 / most, 0)).round_()
    return (whole * (most * (1 / 127))).view_as(x)


def screen_copy(weight: Tensor) -> Tensor:
    """The copy of `weight` `[n, K]` as step_screen.cuh says, uint8 `[n / 16, K / 64, 576]`."""
    n, K = weight.shape
    blocks = ceil_div(n, FEW_ROWS)
    padded = torch.nn.functional.pad(weight, (0, 0, 0, blocks * FEW_ROWS - n))
    values, scales = rounded(padded)
    # of a row: low or high eight, g; of a column: slab, half, pair, t, which of four
    values = values.view(blocks, 2, 8, K // SLAB, 2, 2, 4, 4)
    values = values.permute(0, 3, 2, 6, 4, 5, 7, 1).reshape(blocks, K // SLAB, 512, 2)
    words = values[..., 0] | values[..., 1] << 4
    scales = scales.view(blocks, 2, 8, K // SLAB, 2).permute(0, 3, 2, 4, 1)
    scales = scales.reshape(blocks, K // SLAB, 32).view(torch.uint8)
    return torch.cat([words, scales], -1)
