"""Muon's step in several processes: each orthogonalises some of the matrices of one shape.

Where every process holds all of them, it takes its share, and one all-gather brings all together.
Where each holds some rows of every matrix, the process r of W owns each W-th from the r-th on: one
all-to-all brings their rows to the owners, and one brings the rows of what they made of them back.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from twellctl.training.sharding import rows


def by_replicas(matrices: Sequence[Tensor], run: Callable[[Tensor], Tensor]) -> Tensor:
    """`[B, M, N]`: `run` on the B `matrices`, which all processes have; `run` keeps the shape."""
    world, count, like = dist.get_world_size(), len(matrices), matrices[0]
    share = rows(count, 0, world).stop  # of the first process, which has the most
    mine = matrices[rows(count, dist.get_rank(), world)]
    sent = like.new_zeros(share, *like.shape, dtype=torch.bfloat16 if like.is_cuda else None)
    if mine:
        sent[: len(mine)] = run(torch.stack(mine))
    received = sent.new_empty(share * world, *like.shape)
    dist.all_gather(list(received.split(share)), sent)
    return received[:count]


def by_owners(
    parts: Sequence[Tensor], num_rows: int, run: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """The rows of `run` on whole matrices, of those matrices whose rows the `parts` are.

    `parts` are this process's rows `[m, N]` of matrices `[num_rows, N]`; `run` takes and gives
    `[B, num_rows, N]`. They travel in bfloat16 on a GPU, else in float32.
    """
    rank, world, count = dist.get_rank(), dist.get_world_size(), len(parts)
    heights = [len(range(num_rows)[rows(num_rows, r, world)]) for r in range(world)]
    owned = [range(r, count, world) for r in range(world)]
    num_mine, width = len(owned[rank]), parts[0].shape[1]
    outward = [len(theirs) * heights[rank] for theirs in owned]
    inward = [num_mine * height for height in heights]

    in_order = torch.cat([parts[i] for theirs in owned for i in theirs])
    sent = in_order.to(torch.bfloat16 if in_order.is_cuda else torch.float32)
    received = sent.new_empty(num_mine * num_rows, width)
    dist.all_to_all_single(received, sent, inward, outward)

    made = received
    if num_mine:
        pieces = zip(received.split(inward), heights, strict=True)
        matrices = torch.cat([piece.view(num_mine, h, width) for piece, h in pieces], 1)
        pieces = run(matrices).to(sent.dtype).split(heights, 1)
        made = torch.cat([piece.reshape(-1, width) for piece in pieces])

    dist.all_to_all_single(sent, made, outward, inward)
    back = sent.to(in_order.dtype).view(count, heights[rank], width)
    order = torch.tensor([i for theirs in owned for i in theirs]).argsort().tolist()
    return [back[place] for place in order]
