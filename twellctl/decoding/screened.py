"""Screened gates: a copy of W_gate in 4 bits shows which neurons may fire (step_screen.cuh)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from twellctl.bundle.twell_plan import ceil_div
from twellctl.bundle.twell_spec import FEW_ROWS

GROUP, PANEL = 32, 512  # columns
COPY_BITS = 4 + 16 / GROUP  # of a weight, its scales with it


@dataclass(frozen=True)
class Screen:
    """Of one FFN: `copy` uint8 `[row blocks, K / 512, 4608]`, `limits` float32 `[16 row blocks]`.

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
    """x `[M, K]` as a product with a copy takes it, float32: 8 bits, a scale for each group."""
    groups = x.float().view(len(x), x.shape[1] // GROUP, GROUP)
    most = groups.abs().amax(-1, keepdim=True)
    whole = (groups * torch.where(most > 0, 127 / most, 0)).round_()
    return (whole * (most * (1 / 127))).view_as(x)


def screen_copy(weight: Tensor) -> Tensor:
    """The copy of `weight` `[n, K]` as step_screen.cuh says, uint8 `[n / 16, K / 512, 4608]`.

    Rows and columns that are missing are zeros.
    """
    n, K = weight.shape
    blocks, panels = ceil_div(n, FEW_ROWS), ceil_div(K, PANEL)
    missing = (0, panels * PANEL - K, 0, blocks * FEW_ROWS - n)
    values, scales = rounded(torch.nn.functional.pad(weight, missing))
    # of a row: half, which of eight; of a column: panel, group, word, half of its bytes, which
    values = values.view(blocks, 2, 8, panels, PANEL // GROUP, 4, 2, 4)
    low, high = values.permute(6, 0, 3, 2, 1, 4, 5, 7).reshape(2, blocks, panels, 8 * PANEL)
    scales = scales.view(blocks, 2, 8, panels, PANEL // GROUP).permute(0, 3, 1, 4, 2)
    scales = scales.reshape(blocks, panels, -1).view(torch.uint8)
    return torch.cat([low | high << 4, scales], -1)
