"""`up`, `hidden` and `down` by themselves, over lists of list_builder.py."""

import numpy as np
import torch
from list_builder import Lists, masks_of

DOWN_STAGES = 32768  # bytes of shared memory beside a panel


def there(given, device: str) -> torch.Tensor | None:
    """A tensor, or an array's bits, signed; None stays so."""
    if isinstance(given, np.ndarray):
        given = torch.from_numpy(given.view(given.dtype.str.replace("u", "i")))
    return None if given is None else given.to(device)


def nan(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, torch.nan, device=device, dtype=dtype)


def run_up(
    kernels, device: str, lists: Lists, x, w_up, ranges: tuple[int, int], slabs: int
) -> torch.Tensor:
    """float32 [Q, places], over NaN; `ranges`: slabs of each, and those of neurons."""
    shape, K = lists.shape, x.shape[1]
    num_ranges = -(-(K // 64) // ranges[0])
    places = shape.num_tiles * shape.tile_tokens * shape.cap
    partial = nan(num_ranges, places, device=device)
    kernels.launch(
        "up",
        (shape.num_tiles, num_ranges, ranges[1]),
        512,
        (
            *(there(x, device), there(w_up, device), shape.M, shape.N, K),
            *(shape.tile_tokens, shape.cap, ranges[0], there(lists.pair_start, device)),
            *(there(lists.pairs, device), partial, np.int64(places)),
        ),
        slabs * shape.tile_tokens * 128,
    )
    return partial


def run_hidden(
    kernels, device: str, lists: Lists, partial, bias, grid, room: int
) -> tuple[np.ndarray, np.ndarray]:
    """Bits of the rounds, and masks."""
    shape, rounds = lists.shape, there(lists.rounds, device).clone()
    masks = torch.zeros(masks_of(lists).shape, dtype=torch.int32, device=device)
    made = there(lists.num_rounds, device), rounds, masks
    kernels.launch(
        "hidden",
        grid or (shape.num_tiles,),
        512,
        (
            *(there(partial, device), np.int64(partial.shape[1]), len(partial)),
            *(there(part, device) for part in (lists.links, lists.pair_start, lists.pairs)),
            *(shape.M, shape.N, shape.tile_tokens, shape.cap, shape.panel_rows),
            *(shape.num_panels, shape.group_rounds, there(bias, device), *made),
        ),
        2 * room,
    )
    return bits(rounds, np.uint16).reshape(-1), bits(masks, np.uint32)


def run_hidden_kept(
    kernels, device: str, lists: Lists, sums, grid
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bits of the rounds, masks, and what is kept of each place; `sums` float32 [places]."""
    shape, rounds = lists.shape, there(lists.rounds, device).clone()
    masks = torch.zeros(masks_of(lists).shape, dtype=torch.int32, device=device)
    kept = torch.zeros(len(sums), dtype=torch.int32, device=device)
    kernels.launch(
        "hidden_kept",
        grid,
        512,
        (
            *(there(sums, device), there(lists.links, device), shape.M, shape.panel_rows),
            *(shape.num_panels, shape.group_rounds, there(lists.num_rounds, device)),
            *(rounds, masks, kept),
        ),
    )
    return bits(rounds, np.uint16).reshape(-1), bits(masks, np.uint32), bits(kept, np.uint32)


def bits(tensor: torch.Tensor, dtype: type) -> np.ndarray:
    return tensor.cpu().numpy().view(dtype)


def run_down(kernels, device: str, lists: Lists, rounds, w_down, bias, splits: int) -> np.ndarray:
    """float32 [M, K]: y, over NaN; `w_down` [N, K]."""
    shape, K = lists.shape, w_down.shape[1]
    y = nan(shape.M, K, device=device, dtype=torch.bfloat16)
    sums = nan(shape.M, K, device=device) if shape.num_panels > 1 else None
    given = (w_down, bias, lists.num_rounds, rounds, masks_of(lists))
    given = [there(part, device) for part in given]
    for panel in range(shape.num_panels):
        kernels.launch(
            "down",
            (K // 16, splits),
            512,
            (
                *(*given, shape.M, shape.N, K, panel, shape.panel_rows),
                *(shape.num_panels, shape.group_rounds, sums, y),
            ),
            shape.panel_rows * 32 + DOWN_STAGES,
        )
    return y.float().cpu().numpy()
