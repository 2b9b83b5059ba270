"""What fires; and TwELL, tile-wise ELLPACK, in plain torch: the judge of every kernel.

A gate `[M, N]` (M tokens, N neurons) is cut into tiles of `tile` consecutive columns. Of each
(row, tile) the columns whose gate lies above 0 are kept, in ascending order, in `slots` places:

    counts      [M, T]     how many fired in the tile, also beyond `slots`     T = ceil(N / tile)
    entries     [M, T, S]  value << 16 | column, one int32 a slot              S = slots
    overflowed  [M]        whether the row does not fit, or holds NaN or Inf: its slots do not count

Places behind a tile's count hold zeros. `kernels/README.md` (in an export
`twell_kernels/README.md`) draws the layout. This module is not fast: it is exact, on any device,
for any input.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .twell_config import MAX_COLUMNS, SLOTS, TILE


def fires(gate: Tensor) -> Tensor:
    """Bool, shape of `gate`: above 0, or NaN (which must not vanish)."""
    return (gate > 0) | gate.isnan()


def keep_fired(gate: Tensor) -> Tensor:
    """ReLU: the gate, bit for bit, where it fires, else +0."""
    return torch.where(fires(gate), gate, torch.zeros_like(gate))


class Packed(NamedTuple):
    """A packed gate; the head of the module describes the fields."""

    counts: Tensor
    entries: Tensor
    overflowed: Tensor


def pack(gate: Tensor, tile: int = TILE, slots: int = SLOTS) -> Packed:
    """Pack what fires of `gate` `[M, N]`, any strides, in bf16 or fp16; else `ValueError`."""
    if gate.dim() != 2 or gate.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"pack takes [M, N] of bf16 or fp16, got {list(gate.shape)} {gate.dtype}")
    num_columns = gate.shape[1]
    if num_columns > MAX_COLUMNS or not 1 <= slots <= tile <= MAX_COLUMNS:
        sizes = f"{num_columns} neurons, {slots} slots of {tile}"
        raise ValueError(f"TwELL takes 1 <= slots <= tile, and N, up to {MAX_COLUMNS}, got {sizes}")
    tiles = F.pad(fires(gate), (0, -num_columns % tile)).unflatten(1, (-1, tile))
    counts = tiles.sum(-1, dtype=torch.int32)

    place = tiles.cumsum(-1, dtype=torch.int32) - 1
    row, tile_idx, within = (tiles & (place < slots)).nonzero(as_tuple=True)
    column = tile_idx * tile + within
    entries = torch.zeros((*counts.shape, slots), dtype=torch.int32, device=gate.device)
    value = gate[row, column].view(torch.int16).int()
    entries[row, tile_idx, place[row, tile_idx, within].long()] = value << 16 | column.int()
    return Packed(counts, entries, (counts > slots).any(-1) | ~gate.isfinite().all(-1))
