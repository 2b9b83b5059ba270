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
        {
            "x": there(x, device),
            "w_up": there(w_up, device),
            "M": shape.M,
            "N": shape.N,
            "K": K,
            "tile_tokens": shape.tile_tokens,
            "cap": shape.cap,
            "slabs_per_range": ranges[0],
            "pair_start": there(lists.pair_start, device),
            "pairs": there(lists.pairs, device),
            "partial": partial,
            "partial_stride": places,
        },
        slabs * shape.tile_tokens * 128,
    )
    return partial


def run_hidden(
    kernels, device: str, lists: Lists, partial, bias, grid, room: int
) -> tuple[np.ndarray, np.ndarray]:
    """Bits of the rounds, and masks."""
    shape, rounds = lists.shape, there(lists.rounds, device).clone()
    masks = torch.zeros(masks_of(lists).shape, dtype=torch.int32, device=device)
    kernels.launch(
        "hidden",
        grid or (shape.num_tiles,),
        512,
        {
            "partial": there(partial, device),
            "partial_stride": partial.shape[1],
            "num_ranges": len(partial),
            "links": there(lists.links, device),
            "pair_start": there(lists.pair_start, device),
            "pairs": there(lists.pairs, device),
            "M": shape.M,
            "N": shape.N,
            "tile_tokens": shape.tile_tokens,
            "cap": shape.cap,
            "panel_rows": shape.panel_rows,
            "num_panels": shape.num_panels,
            "group_rounds": shape.group_rounds,
            "b_up": there(bias, device),
            "num_rounds": there(lists.num_rounds, device),
            "rounds": rounds,
            "masks": masks,
        },
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
        {
            "sums": there(sums, device),
            "links": there(lists.links, device),
            "M": shape.M,
            "panel_rows": shape.panel_rows,
            "num_panels": shape.num_panels,
            "group_rounds": shape.group_rounds,
            "num_rounds": there(lists.num_rounds, device),
            "rounds": rounds,
            "masks": masks,
            "kept": kept,
        },
    )
    return bits(rounds, np.uint16).reshape(-1), bits(masks, np.uint32), bits(kept, np.uint32)


def bits(tensor: torch.Tensor, dtype: type) -> np.ndarray:
    return tensor.cpu().numpy().view(dtype)


def run_down(kernels, device: str, lists: Lists, rounds, w_down, bias, splits: int) -> np.ndarray:
    """float32 [M, K]: y, over NaN; `w_down` [N, K]."""
    shape, K = lists.shape, w_down.shape[1]
    y = nan(shape.M, K, device=device, dtype=torch.bfloat16)
    sums = nan(shape.M, K, device=device) if shape.num_panels > 1 else None
    given = {
        "w_down": there(w_down, device),
        "b_down": there(bias, device),
        "num_rounds": there(lists.num_rounds, device),
        "rounds": there(rounds, device),
        "masks": there(masks_of(lists), device),
    }
    for panel in range(shape.num_panels):
        kernels.launch(
            "down",
            (K // 16, splits),
            512,
            {
                **given,
                "M": shape.M,
                "N": shape.N,
                "K": K,
                "panel": panel,
                "panel_rows": shape.panel_rows,
                "num_panels": shape.num_panels,
                "group_rounds": shape.group_rounds,
                "y32": sums,
                "y": y,
            },
            shape.panel_rows * 32 + DOWN_STAGES,
        )
    return y.float().cpu().numpy()
