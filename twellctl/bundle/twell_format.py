"""TwELL, tile-wise ELLPACK, in plain torch: the judge of every kernel.

A gate `[M, N]` (M tokens, N neurons) is cut into tiles of `tile` consecutive columns. Of each
(row, tile) the columns whose gate lies above 0 are kept, in ascending order, in `slots` places:

    counts   [M, T]     how many fired in the tile, also beyond `slots`     T = ceil(N / tile)
    entries  [M, T, S]  bf16, fp16: value << 16 | column, one int32 a slot  S = slots
    columns, values     wider types: int16 (read as unsigned) and the value, two parallel [M, T, S]
    backup   [B, N]     the rows that do not fit (a tile overflowed) or hold NaN or Inf, dense
    backup_row [M]      the row's place in `backup`, -1 for a row that fits

Places behind a tile's count hold zeros. `kernels/README.md` (in an export
`twell_kernels/README.md`) draws the layout. This module is not fast: it is exact, on any device,
for any input.
"""

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Packed:
    """A packed gate `[M, N]`; the head of the module describes the fields."""

    counts: Tensor
    entries: Tensor | None
    columns: Tensor | None
    values: Tensor | None
    backup: Tensor
    backup_row: Tensor
    num_columns: int
    tile: int

    @property
    def nnz(self) -> Tensor:
        """int64 `[M]`: neurons that fired, backup rows included."""
        return self.counts.sum(-1)

    @property
    def overflowed(self) -> Tensor:
        """Bool `[M]`: rows that live in the backup."""
        return self.backup_row >= 0


def pack(gate: Tensor, tile: int = TILE, slots: int = SLOTS) -> Packed:
    """Pack what fires of `gate` `[M, N]`, any strides, dtype bf16, fp16, fp32 or fp64, any device.

    `ValueError` for other shapes and dtypes, N > 65536, or numbers out of range.
    """
    _check(gate, tile, slots)
    num_rows, num_columns = gate.shape
    fired = fires(gate)
    num_tiles = -(-num_columns // tile)
    tiles = F.pad(fired, (0, num_tiles * tile - num_columns)).view(num_rows, num_tiles, tile)
    counts = tiles.sum(-1, dtype=torch.int32)

    place = tiles.cumsum(-1, dtype=torch.int32) - 1
    row, tile_idx, within = (tiles & (place < slots)).nonzero(as_tuple=True)
    at = (row, tile_idx, place[row, tile_idx, within].long())
    column = tile_idx * tile + within
    value = gate[row, column]
    shape = (num_rows, num_tiles, slots)
    entries = columns = values = None
    if gate.dtype.itemsize == 2:
        entries = torch.zeros(shape, dtype=torch.int32, device=gate.device)
        entries[at] = value.view(torch.int16).int() << 16 | column.int()
    else:
        columns = torch.zeros(shape, dtype=torch.int16, device=gate.device)
        values = torch.zeros(shape, dtype=gate.dtype, device=gate.device)
        columns[at], values[at] = column.short(), value

    overflowed = (counts > slots).any(-1) | ~gate.isfinite().all(-1)
    backup = keep_fired(gate[overflowed])
    backup_row = torch.where(overflowed, overflowed.cumsum(0) - 1, -1).int()
    return Packed(counts, entries, columns, values, backup, backup_row, num_columns, tile)


def fired_positions(packed: Packed) -> tuple[Tensor, Tensor, Tensor]:
    """(row, column, value) of each filled slot, without backup rows, in the gate's order."""
    slots = (packed.columns if packed.entries is None else packed.entries).shape[-1]
    filled = torch.arange(slots, device=packed.counts.device) < packed.counts[..., None]
    row, tile_idx, slot = (filled & ~packed.overflowed[:, None, None]).nonzero(as_tuple=True)
    if packed.entries is None:
        at = packed.columns[row, tile_idx, slot]
        value = packed.values[row, tile_idx, slot]
    else:
        entry = packed.entries[row, tile_idx, slot]
        at = entry
        value = (entry >> 16).short().view(packed.backup.dtype)
    return row, at.long() & 0xFFFF, value


def unpack(packed: Packed) -> Tensor:
    """The dense `[M, N]` that was packed: bit for bit the gate where it fired, +0 elsewhere."""
    num_rows = packed.counts.shape[0]
    gate = packed.backup.new_zeros(num_rows, packed.num_columns)
    row, column, value = fired_positions(packed)
    gate[row, column] = value
    gate[packed.overflowed] = packed.backup
    return gate


def _check(gate: Tensor, tile: int, slots: int) -> None:
    if gate.dim() != 2 or not gate.is_floating_point() or gate.dtype.itemsize < 2:
        raise ValueError(
            f"pack takes [M, N] of bf16, fp16, fp32 or fp64, got {list(gate.shape)} {gate.dtype}"
        )
    if gate.shape[1] > MAX_COLUMNS:
        raise ValueError(
            f"TwELL holds columns in 16 bits: at most {MAX_COLUMNS} neurons, got {gate.shape[1]}"
        )
    if not (1 <= slots <= tile <= MAX_COLUMNS):
        raise ValueError(f"TwELL needs 1 <= slots <= tile <= {MAX_COLUMNS}, got {slots} of {tile}")
