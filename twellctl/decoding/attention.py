"""Attention of new tokens over paged keys and values, with rotary, over our own kernels.

B rows of Q new tokens each, H heads of q, Hkv heads of k and v, D their size. All bf16, contiguous,
on one device. What is computed, and how it is rounded, stands in kernels/decode/attend.cuh; how a
launch is laid out, here. Nothing depends on values on
the device: a CUDA graph can hold it all. The kernels may start before the one in front of them has
ended, as kernels/ptx/pdl.cuh says.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twellctl.bundle import twell_spec as spec
from twellctl.bundle.twell_launch import KernelSet
from twellctl.bundle.twell_plan import ceil_div

_MAX_SPLITS = 64
_WHOLE_BATCHES = 3  # a warp's, of a row that is not split: putting parts together takes 2 us
_ALIKE_BATCHES = 2  # a warp's, of a row that is split, in stable passes
_SPLIT_POSITIONS = 4096  # a block's at most, or one long row holds up all others ...
_WAVES = 8  # ... but not beyond so many blocks a place for one: most may find nothing to do
MOST_QUERIES = spec.MOST_QUERIES


# ---- attention ----


def _check_queries(queries: int) -> None:
    """`ValueError` for more than the kernel waits for: its is_old takes keys that are further back
    for those of passes before (attend_job.cuh)."""
    if not 1 <= queries <= MOST_QUERIES:
        raise ValueError(f"a row has 1 to {MOST_QUERIES} new tokens in a launch, not {queries}")


def why_not_attend(H: int, Hkv: int, D: int) -> str | None:
    """None if `attend` takes such heads, else a sentence."""
    most = max(spec.HEAD_DIMS)
    if D % 2 or most < D:
        said = f"an even number of columns up to {most}"
        return f"the attention kernel takes heads of {said}, not of {D}"
    if H % Hkv:
        return f"the attention kernel shares {Hkv} heads of keys evenly, and {H} are not a multiple"
    return None


class Heads(NamedTuple):
    """H heads of q and Hkv of k and v, of D columns each."""

    H: int
    Hkv: int
    D: int


@dataclass(frozen=True)
class AttendPlan:
    """How `attend` is laid over B rows of `queries` new tokens each.

    Each token is computed as if it were its row's only one: splits depend on the number of rows and
    on positions, so that a token's result has the same bits for any number of `queries`.
    """

    B: int
    H: int
    Hkv: int
    D: int
    heads: int  # of q, in one block
    splits: int  # of a row, at most
    num_warps: int  # of a block
    whole_batches: int = _WHOLE_BATCHES  # a warp's: rows of no more are not split
    split_batches: int = 1  # a warp's, of a row that is split
    queries: int = 1

    @cached_property
    def width(self) -> int:
        return head_width(self.D)

    @cached_property
    def entry(self) -> str:
        return f"attend_{self.width}_{self.heads}"

    @cached_property
    def grid(self) -> tuple[int, int, int]:
        blocks = self.Hkv * -(-self.H // self.Hkv // self.heads)
        return blocks, self.B * self.queries, self.splits

    @cached_property
    def smem_bytes(self) -> int:
        D = self.width
        return 4 * (self.heads * D + D + self.num_warps * self.heads * (D + 2))

    @cached_property
    def num_parts(self) -> int:
        """float32 values that splits leave for each other."""
        blocks, tokens, splits = self.grid
        part = self.heads * (self.width + 2)
        return blocks * tokens * splits * part if splits > 1 else 0

    @cached_property
    def num_tickets(self) -> int:
        blocks, tokens, splits = self.grid
        return blocks * tokens if splits > 1 else 0


def _heads_of_block(sharing: int) -> int:
    return next((heads for heads in spec.HEADS_A_BLOCK if heads >= sharing), spec.HEADS_A_BLOCK[-1])


def head_width(D: int) -> int:
    """Columns that the kernel has for heads of D, in the cache too; those from D on are zeros."""
    return next(width for width in spec.HEAD_DIMS if width >= D)


def batch_positions(D: int) -> int:
    """Positions that a warp of `attend` takes at a time."""
    return spec.ATTEND_LOADS * _side_by_side(D)


def _side_by_side(D: int) -> int:
    """Positions that a warp of `attend` holds, 16 bytes of one in each lane."""
    return 4 if D <= 64 else 2 if D <= 128 else 1


def plan_attend(
    B: int, H: int, Hkv: int, D: int, max_positions: int, num_sms: int, queries: int = 1
) -> AttendPlan:
    """The plan for B rows of up to `max_positions`, with `queries` new tokens each.

    Splits that a row is too short for cost little, but not nothing: give graphs for short rows a
    plan of their own.
    `ValueError` if `why_not_attend` has a reason, or for more than `MOST_QUERIES`.
    """
    if reason := why_not_attend(H, Hkv, D):
        raise ValueError(reason)
    _check_queries(queries)
    sharing = H // Hkv
    heads = _heads_of_block(sharing)
    blocks = B * Hkv * -(-sharing // heads)
    at_once = num_sms * (2 if heads == 1 else 1)  # blocks of 8 warps, by their registers
    # a head of the new token for each position that they hold
    num_warps = 4 if blocks > at_once and 4 * _side_by_side(D) >= heads + 2 else 8
    by_length = min(-(-max_positions // _SPLIT_POSITIONS), _WAVES * at_once // blocks)
    useful = _useful_splits(D, max_positions, num_warps)
    splits = max(1, min(max(at_once // blocks, by_length), useful, _MAX_SPLITS))
    return AttendPlan(B, H, Hkv, D, heads, splits, num_warps, queries=queries)


def plan_alike(
    B: int, H: int, Hkv: int, D: int, max_positions: int, num_sms: int, queries: int, longest: int
) -> AttendPlan:
    """As `plan_attend`, but a token's result has the same bits for any `B`, `queries` and
    `max_positions`: the splits are those of one row of up to `longest` positions, but for those
    that no row uses. Blocks may have fewer heads, which changes no bit."""
    alone = plan_attend(1, H, Hkv, D, longest, num_sms)
    _check_queries(queries)
    useful = _useful_splits(D, max_positions, alone.num_warps, _ALIKE_BATCHES)
    splits = min(alone.splits, useful)
    fine = (
        heads
        for heads in spec.HEADS_A_BLOCK
        if B * queries * Hkv * ceil_div(H // Hkv, heads) * splits <= num_sms
    )
    heads = min(alone.heads, next(fine, alone.heads))  # the same bits, sooner
    how = {"heads": heads, "splits": splits, "split_batches": _ALIKE_BATCHES}
    return replace(alone, B=B, queries=queries, **how)


def _useful_splits(D: int, max_positions: int, num_warps: int, split_batches: int = 1) -> int:
    """How many splits a row of so many positions uses, at most."""
    batches = ceil_div(max_positions, batch_positions(D) * num_warps)  # of a warp
    return 1 if batches <= _WHOLE_BATCHES else ceil_div(batches, split_batches)


@dataclass(frozen=True)
class Workspace:
    """What the splits of a row hand to each other; for launches that follow one another."""

    parts: Tensor  # float32
    tickets: Tensor  # int32, zero between launches


def open_workspace(plans: Iterable[AttendPlan], device: torch.device) -> Workspace:
    """One workspace for all of `plans`, and for all layers."""
    plans = list(plans)
    parts = max((plan.num_parts for plan in plans), default=0)
    tickets = max((plan.num_tickets for plan in plans), default=0)
    return Workspace(
        torch.empty(max(parts, 1), dtype=torch.float32, device=device),
        torch.zeros(max(tickets, 1), dtype=torch.int32, device=device),
    )


@dataclass(frozen=True)
class AttendLayer:
    """What `attend` needs of a layer."""

    keys: Tensor  # [num_pages, Hkv, PAGE, head_width(D)]
    values: Tensor
    scale: float
    window: int | None = None  # positions that count, the new one included
    # [head_width(D)], RMSNorm over each head before rotary; both or none
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    cap: float | None = None  # of scores: cap tanh(score / cap)


def attend(
    kernels: KernelSet,
    plan: AttendPlan,
    layer: AttendLayer,
    qkv: Tensor,
    positions: Tensor,
    tables: Tensor,
    rotary: "Rotary",
    workspace: Workspace,
) -> Tensor:
    """`[B Q, (H + 2 Hkv) D]` of the new tokens to `[B Q, H D]`; their k and v go into the cache.

    A row's tokens lie together: `positions` int32 `[B Q]`, `tables` int32 `[B Q, W]`, a row's table
    for each of its tokens; tables may lie further apart. `rotary` as `rotary_tables` has it. A
    token attends to what is cached below its position, the row's other new tokens included, and to
    itself. With Q > 1 a position below 0 is no token: nothing is stored for it, and nobody uses
    what is returned for it.
    """
    if plan.queries > 1:
        heads = Heads(plan.H, plan.Hkv, plan.D)
        store_keys(kernels, heads, layer, qkv, positions, tables, rotary)
    out = qkv.new_empty(len(qkv), plan.H * plan.D)
    kernels.launch(
        plan.entry,
        plan.grid,
        32 * plan.num_warps,
        {
            "qkv": qkv,
            "positions": positions,
            "tables": tables,
            "table_stride": tables.stride(0),
            "width": tables.shape[1],
            "cos": rotary.cos,
            "sin": rotary.sin,
            "columns": plan.D,
            "half": rotary.turned // 2,
            "q_norm": layer.q_norm,
            "k_norm": layer.k_norm,
            "eps": layer.eps,
            "keys": layer.keys,
            "values": layer.values,
            "num_kv_heads": plan.Hkv,
            "sharing": plan.H // plan.Hkv,
            "window": layer.window or 0,
            "whole_batches": plan.whole_batches,
            "split_batches": plan.split_batches,
            "new_is_cached": plan.queries > 1,
            "scale": layer.scale,
            "cap": layer.cap or 0,
            "parts": workspace.parts,
            "tickets": workspace.tickets,
            "out": out,
        },
        plan.smem_bytes,
        overlap=True,
    )
    return out


def store_keys(
    kernels: KernelSet,
    heads: Heads,
    layer: AttendLayer,
    qkv: Tensor,
    positions: Tensor,
    tables: Tensor,
    rotary: "Rotary",
) -> None:
    """k and v of all new tokens into the cache, before any of them is read; as of `attend`."""
    H, Hkv, D = heads
    width = head_width(D)
    kernels.launch(
        "store_keys",
        (Hkv, len(qkv)),
        32,
        {
            "qkv": qkv,
            "positions": positions,
            "tables": tables,
            "table_stride": tables.stride(0),
            "cos": rotary.cos,
            "sin": rotary.sin,
            "columns": D,
            "half": rotary.turned // 2,
            "k_norm": layer.k_norm,
            "eps": layer.eps,
            "keys": layer.keys,
            "values": layer.values,
            "num_kv_heads": Hkv,
            "sharing": H // Hkv,
            "width": width,
        },
        20 * width,
        overlap=True,
    )


# ---- rotary ----


@dataclass(frozen=True)
class Rotary:
    """The angles by which positions turn heads: cos and sin `[positions, head_width(D)]`, bf16.

    The first `turned` columns of a head are turned; for the others cos is 1 and sin 0.
    """

    cos: Tensor
    sin: Tensor
    turned: int

    @classmethod
    def none(cls, num_positions: int, D: int, device: torch.device) -> "Rotary":
        """For heads that their positions do not turn."""
        ones = torch.ones(num_positions, head_width(D), dtype=torch.bfloat16, device=device)
        return cls(ones, torch.zeros_like(ones), D)


@torch.inference_mode()
def rotary_tables(
    rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], num_positions: int, D: int, device
) -> Rotary:
    """What the model's rotary embedding computes, for heads of D.

    Its angles must depend on the position alone, as those of any model in pages do
    (torch_decoder.py).
    """
    like = torch.empty(1, dtype=torch.bfloat16, device=device)
    positions = torch.arange(num_positions, device=device)[None]
    parts = [rotary(like, part) for part in positions.split(8192, dim=1)]
    cos, sin = (
        torch.cat([table[0].bfloat16() for table in tables]) for tables in zip(*parts, strict=True)
    )
    rest = 0, head_width(D) - cos.shape[1]
    return Rotary(F.pad(cos, rest, value=1.0), F.pad(sin, rest), cos.shape[1])
