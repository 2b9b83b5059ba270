"""Muon's step in several processes: each orthogonalises some of the matrices of one shape.

The process r of W owns each W-th of them from the r-th on. Where every process holds all matrices,
the owner alone gets its gradient's mean and moves its momentum, and all-gathers bring together
what owners made. Where each holds some rows of every matrix, one all-to-all brings their rows to
the owners, and one brings the rows of what they made of them back.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from twellctl.training.sharding import rows

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch < 2.13


def owners_of(matrices: Iterable[Tensor]) -> dict[Tensor, int]:
    """Which process steps each of the `matrices`, which all of them hold."""
    seen: dict[torch.Size, int] = {}
    owners = {}
    for matrix in matrices:
        place = seen[matrix.shape] = seen.get(matrix.shape, -1) + 1
        owners[matrix] = place % dist.get_world_size()
    return owners


def by_replicas(
    owners: Sequence[int], mine: Sequence[Tensor], like: Tensor, run: Callable[[Tensor], Tensor]
) -> Callable[[], list[Tensor]]:
    """Of matrices as `like` with these `owners`: `run` on `mine`, those of this process.

    `run` takes and gives `[B, M, N]`. What is returned waits for what the others made of theirs,
    and gives all, in order.
    """
    world = dist.get_world_size()
    most = max(map(owners.count, range(world)))
    sent = like.new_zeros(most, *like.shape, dtype=torch.bfloat16 if like.is_cuda else None)
    if mine:
        sent[: len(mine)] = run(torch.stack(list(mine)))
    received = sent.new_empty(most * world, *like.shape)
    gathered = _gather(received, sent, async_op=True)
    places = [owner * most + owners[:i].count(owner) for i, owner in enumerate(owners)]

    def end() -> list[Tensor]:
        gathered.wait()
        return [received[place] for place in places]

    return end


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
