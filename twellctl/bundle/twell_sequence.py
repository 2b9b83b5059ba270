"""The gated FFN for many tokens on Hopper, as a sequence of kernel launches:

    gate_pack -> plan_cluster -> up -> hidden -> down -> the heavy rows

Up to 64 tokens go through twell_few.py, where the GPU has the shared memory for it. The host reads
nothing back and sizes nothing by what fired, so that a CUDA graph can hold it all; buffers are
torch's. What each kernel does stands in `kernels/SOURCES.md`, what each buffer holds in the heads
of plan.cu, up.cu, hidden.cu and down.cu.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import twell_spec as spec
from .twell_heavy import heavy_products
from .twell_launch import KernelSet, tensor_map
from .twell_plan import (
    GATE_PACK_SMEM,
    PARTS_BLOCKS,
    Limits,
    Plan,
    chunk_tokens,
    hopper_cap,
    make_plan,
    product_grid,
)
from .twell_weights import FFN


@dataclass(frozen=True)
class PairLists:
    """The lists of what fired (plan.cu); masks and gate_up where they were made."""

    pair_start: Tensor
    pairs: Tensor
    num_rounds: Tensor
    rounds: Tensor
    links: Tensor
    heavy_rows: Tensor
    heavy_count: Tensor
    masks: Tensor | None = None
    gate_up: Tensor | None = None  # of each pair gate | up << 16
    num_heavy: Tensor | None = None  # heavy_count on the host, as `sent_to_host` returns it


def hopper_ffn(kernels: KernelSet, limits: Limits, x: Tensor, ffn: FFN, slots: int) -> Tensor:
    """`[M, K]` to `[M, K]`, M >= 1, bf16, contiguous; `slots` a tile; with more a row is heavy."""
    y = torch.empty_like(x)
    for plan, xs, ys in chunks_of(x, y, ffn, slots, hopper_cap(ffn.N), limits):
        packed = packed_buffers(plan, x.device)
        launch_gate_pack(kernels, limits, xs, ffn.gate.values, ffn.gate.bias, *packed)
        lists = launch_plan(kernels, plan, *packed)
        partial = launch_up(kernels, plan, xs, ffn.up.values, lists)
        lists = launch_hidden(kernels, limits, plan, partial, ffn, lists)
        launch_down(kernels, plan, ffn, lists, ys)
        heavy_products(kernels, limits, xs, ys, ffn, lists.heavy_rows, lists.heavy_count)
    return y


def launch_gate_pack(
    kernels: KernelSet,
    limits: Limits,
    x: Tensor,
    w_gate: Tensor,
    b_gate: Tensor | None,
    counts: Tensor,
    entries: Tensor,
    heavy_count: Tensor,
) -> None:
    """The gate product and its packing in one kernel, into `counts` and `entries`."""
    M, (N, K) = x.shape[0], w_gate.shape
    kernels.launch(
        "gate_pack",
        (product_grid(M, N, limits.num_sms),),
        spec.PRODUCT_BLOCK,
        {
            "x_map": tensor_map(x, spec.INPUT_BOX_ROWS),
            "w_map": tensor_map(w_gate, spec.WEIGHT_BOX_ROWS),
            "b_gate": b_gate,
            "num_rows": M,
            "num_columns": N,
            "num_inner": K,
            "num_slots": entries.shape[2],
            "counts": counts,
            "entries": entries,
            "heavy_count": heavy_count,
        },
        GATE_PACK_SMEM,
    )


def chunks_of(
    x: Tensor, y: Tensor, ffn: FFN, slots: int, cap: int, limits: Limits
) -> Iterator[tuple[Plan, Tensor, Tensor]]:
    """Plan, inputs and outputs of each chunk of tokens."""
    size = chunk_tokens(x.shape[0], ffn.N, ffn.K, slots, cap, limits)
    if size == x.shape[0]:
        yield make_plan(size, ffn.N, ffn.K, slots, cap, limits), x, y
        return
    for xs, ys in zip(x.split(size), y.split(size), strict=True):
        yield make_plan(xs.shape[0], ffn.N, ffn.K, slots, cap, limits), xs, ys


def packed_buffers(plan: Plan, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """counts, entries and the number of heavy rows, not filled."""
    tiles = (plan.M, plan.num_gate_tiles)
    counts = torch.empty(tiles, dtype=torch.int32, device=device)
    entries = torch.empty((*tiles, plan.slots), dtype=torch.int32, device=device)
    return counts, entries, torch.empty(1, dtype=torch.int32, device=device)


def launch_plan(
    kernels: KernelSet, plan: Plan, counts: Tensor, entries: Tensor, heavy_count: Tensor
) -> PairLists:
    """The lists of what fired, of its packed form."""
    M, P = plan.M, plan.num_panels

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=counts.device)

    lists = PairLists(
        pair_start=empty(plan.num_tiles, plan.num_neuron_groups + 1),
        pairs=empty(plan.num_pairs),
        num_rounds=empty(plan.num_groups * P),
        rounds=empty(plan.num_groups * P, plan.group_rounds, spec.ROUND_BYTES // 4),
        links=empty(plan.num_groups * P, plan.group_rounds, spec.ROUND),
        heavy_rows=empty(M),
        heavy_count=heavy_count,
    )
    kernels.launch(
        "plan_cluster",
        (plan.num_tiles * spec.PLAN_CLUSTER,),
        spec.PLAN_CLUSTER_BLOCK,
        {
            "counts": counts,
            "entries": entries,
            "M": M,
            "N": plan.N,
            "S": plan.slots,
            "cap": plan.cap,
            "most": plan.most,
            "tile_tokens": plan.tile_tokens,
            "panel_rows": plan.panel_rows,
            "num_panels": P,
            "group_rounds": plan.group_rounds,
            "num_rounds": lists.num_rounds,
            "rounds": lists.rounds,
            "links": lists.links,
            "pair_start": lists.pair_start,
            "pairs": lists.pairs,
            "heavy_rows": lists.heavy_rows,
            "heavy_count": heavy_count,
        },
        plan.plan_cluster_smem,
    )
    return lists


def launch_up(
    kernels: KernelSet, plan: Plan, x: Tensor, weight: Tensor, lists: PairLists
) -> Tensor:
    """Parts of the dot product of each pair's rows of `x` `[M, K]` and `weight` `[N, K]`, fp32."""
    partial = x.new_empty((plan.num_ranges, plan.num_pairs), dtype=torch.float32)
    kernels.launch(
        "up",
        plan.up_grid,
        spec.UP_BLOCK,
        {
            "x": x,
            "w_up": weight,
            "M": plan.M,
            "N": plan.N,
            "K": plan.K,
            "tile_tokens": plan.tile_tokens,
            "cap": plan.cap,
            "slabs_per_range": plan.slabs_per_range,
            "pair_start": lists.pair_start,
            "pairs": lists.pairs,
            "partial": partial,
            "partial_stride": plan.num_pairs,
        },
        plan.up_smem,
    )
    return partial


def launch_hidden(
    kernels: KernelSet,
    limits: Limits,
    plan: Plan,
    partial: Tensor,
    ffn: FFN,
    lists: PairLists,
) -> PairLists:
    """Fill the rounds with h; returns the lists with masks."""
    grid, smem_bytes = plan.hidden_launch(limits)
    lists = replace(lists, masks=_masks(plan, partial))
    kernels.launch(
        "hidden",
        grid,
        spec.HIDDEN_BLOCK,
        {
            "partial": partial,
            "partial_stride": plan.num_pairs,
            "num_ranges": plan.num_ranges,
            "links": lists.links,
            "pair_start": lists.pair_start,
            "pairs": lists.pairs,
            "M": plan.M,
            "N": plan.N,
            "tile_tokens": plan.tile_tokens,
            "cap": plan.cap,
            "panel_rows": plan.panel_rows,
            "num_panels": plan.num_panels,
            "group_rounds": plan.group_rounds,
            "b_up": ffn.up.bias,
            "num_rounds": lists.num_rounds,
            "rounds": lists.rounds,
            "masks": lists.masks,
        },
        smem_bytes,
    )
    return lists


def launch_hidden_kept(
    kernels: KernelSet, limits: Limits, plan: Plan, partial: Tensor, lists: PairLists
) -> PairLists:
    """The same without a bias of up; keeps gate and up of each pair, too."""
    if plan.num_ranges > 1:
        kernels.launch(
            "add_parts",
            (plan.num_tiles, PARTS_BLOCKS),
            spec.GRAD_PAIRS_BLOCK,
            {
                "partial": partial,
                "partial_stride": plan.num_pairs,
                "num_ranges": plan.num_ranges,
                "pair_start": lists.pair_start,
                "N": plan.N,
                "tile_tokens": plan.tile_tokens,
                "cap": plan.cap,
            },
        )
    lists = replace(lists, masks=_masks(plan, partial), gate_up=torch.empty_like(lists.pairs))
    kernels.launch(
        "hidden_kept",
        plan.gather_grid(limits),
        spec.HIDDEN_BLOCK,
        {
            "sums": partial,
            "links": lists.links,
            "M": plan.M,
            "panel_rows": plan.panel_rows,
            "num_panels": plan.num_panels,
            "group_rounds": plan.group_rounds,
            "num_rounds": lists.num_rounds,
            "rounds": lists.rounds,
            "masks": lists.masks,
            "kept": lists.gate_up,
        },
    )
    return lists


def _masks(plan: Plan, like: Tensor) -> Tensor:
    size = (plan.num_groups * plan.num_panels, plan.group_batches, spec.BATCH_MASKS)
    return like.new_empty(size, dtype=torch.int32)


def launch_down(kernels: KernelSet, plan: Plan, ffn: FFN, lists: PairLists, y: Tensor) -> None:
    """y of the filled rounds; that of heavy rows is not what it should be."""
    M, N, K, P = plan.M, plan.N, plan.K, plan.num_panels
    sums = y.new_empty((M, K), dtype=torch.float32) if P > 1 else None
    for panel in range(P):
        kernels.launch(
            "down",
            plan.down_grid,
            spec.DOWN_BLOCK,
            {
                "w_down": ffn.by_neurons,
                "b_down": ffn.down.bias,
                "num_rounds": lists.num_rounds,
                "rounds": lists.rounds,
                "masks": lists.masks,
                "M": M,
                "N": N,
                "K": K,
                "panel": panel,
                "panel_rows": plan.panel_rows,
                "num_panels": P,
                "group_rounds": plan.group_rounds,
                "y32": sums,
                "y": y,
            },
            plan.down_smem,
        )
