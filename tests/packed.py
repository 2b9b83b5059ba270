"""The packed form of a gate (kernels/README.md) in plain torch: the judge of `gate_pack`."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twellctl.bundle.twell_format import fires


class Packed(NamedTuple):
    """`counts` int32 `[M, T]`, `entries` int32 `[M, T, S]` of bf16; which rows do not fit."""

    counts: Tensor
    entries: Tensor | None
    overflowed: Tensor


def pack(gate: Tensor, tile: int, slots: int) -> Packed:
    """What fires of `gate` `[M, N]`, in ascending order of columns."""
    num_rows, num_columns = gate.shape
    num_tiles = -(-num_columns // tile)
    padded = F.pad(fires(gate), (0, num_tiles * tile - num_columns))
    tiles = padded.view(num_rows, num_tiles, tile)
    counts, entries = tiles.sum(-1, dtype=torch.int32), None
    if gate.dtype == torch.bfloat16:
        place = tiles.cumsum(-1) - 1
        row, tile_idx, within = (tiles & (place < slots)).nonzero(as_tuple=True)
        column = tile_idx * tile + within
        entries = counts.new_zeros(num_rows, num_tiles, slots)
        values = gate[row, column].view(torch.int16).int()
        entries[row, tile_idx, place[row, tile_idx, within]] = values << 16 | column.int()
    return Packed(counts, entries, (counts > slots).any(-1) | ~gate.isfinite().all(-1))
