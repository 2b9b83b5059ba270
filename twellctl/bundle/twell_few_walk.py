"""up, h and down for few tokens on Hopper where few neurons fire: by token, not by their union.

    the gate product (few_linear; in bf16 beyond 32 tokens torch's) -> few_walk

Its time goes by pairs (token, neuron that fired), where that of few_hidden and few_down goes by the
union of what fires; any density is exact, few_walk has no limits to run into. Weights are of
any kind; inputs are bf16. What it does stands in kernels/ffn/few_walk.cuh.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Unpack

import torch
from torch import Tensor

from . import twell_spec as spec
from .twell_launch import KernelSet
from .twell_plan import Limits, ceil_div, round_up
from .twell_weights import FFN, Onto

WALK_TOKENS = range(4, 65)
# bytes of up and down that a token may take, by tokens, up to so many; the walk is still up to 12 %
# faster a little beyond, with random neurons on an H200, but real tokens share more of theirs
WALK_BYTES, WALK_GROWS = 250_000, 16
LINEAR_TOKENS = 32  # up to here the gate product over bf16 is few_linear's
# over weights of 8 bits threads would do for twice that: not tried with few tokens
_MOST_K = 8 * spec.FEW_WALK_BLOCK

AtOnce = Callable[[str, int, int, int], int]  # KernelSet.clusters_at_once


@dataclass(frozen=True)
class FewWalkPlan:
    """One launch: a cluster of `size` blocks a token."""

    name: str
    size: int
    ways: int
    warps: int  # of a way
    cap: int  # places in the list of a block
    columns: int  # of y that a block adds up
    smem_bytes: int

    @property
    def threads(self) -> int:
        return 32 * self.warps * self.ways


def few_walk_entries(kind: str) -> tuple[str, ...]:
    """All entries, over weights of `kind`."""
    names = (f"few_walk_{size}{form}" for size in spec.WALK_SIZES for form in ("", "_all"))
    return tuple(spec.entry(name, kind) for name in names)


def takes_few_walk(M: int, N: int, K: int, limits: Limits, kind: str) -> bool:
    """Whether few_walk takes `M` tokens on this device."""
    if not limits.hopper or M not in WALK_TOKENS or K > _MOST_K:
        return False
    return _plan(N, K, spec.WALK_SIZES[-1], kind).smem_bytes <= limits.smem_bytes


def suits_few_walk(M: int, N: int, K: int, density: float | None, kind: str) -> bool:
    """Whether few_walk is the faster by the rule; `density` None: it is not known."""
    of_pair = spec.KINDS[kind].bits // 4 * K  # bytes
    return density is not None and of_pair * N * density <= WALK_BYTES * min(M, WALK_GROWS)


def _columns(kind: str) -> int:
    """Of K, that a thread has: 16 bytes of a row."""
    return 128 // spec.KINDS[kind].bits


@lru_cache(maxsize=4096)
def _plan(N: int, K: int, size: int, kind: str) -> FewWalkPlan:
    """Of lists with `cap` places, for K up to _MOST_K."""
    own, (warps, ways) = _columns(kind), _warps_and_ways(K, kind)
    all_ = spec.FEW_WALK_CHUNKS * 32 * warps * ways >= N // 8  # all gates are looked at in one go
    name = f"few_walk_{size}{'_all' if all_ else ''}"
    cap = round_up(ceil_div(N, size) if all_ else 8 * ceil_div(N // 8, size), 4)
    columns = own * ceil_div(K // own, size)
    parts = 2 * warps * spec.FEW_WALK_QUADS * spec.FEW_WALK_BATCH * 4
    smem_bytes = spec.FEW_WALK_HEAD + 8 * cap + ways * (parts + 4 * size * columns)
    return FewWalkPlan(spec.entry(name, kind), size, ways, warps, cap, columns, smem_bytes)


def _warps_and_ways(K: int, kind: str) -> tuple[int, int]:
    own = _columns(kind)
    warps = 2 * ceil_div(K, 64 * own)  # of a way
    return warps, min(spec.FEW_WALK_WAYS * own // 8, spec.FEW_WALK_BLOCK // (32 * warps))


def plan_few_walk(
    M: int, N: int, K: int, limits: Limits, at_once: AtOnce, kind: str
) -> FewWalkPlan:
    """The largest clusters of which all run at the same time, for what `takes_few_walk`."""
    for size in spec.WALK_SIZES:
        plan = _plan(N, K, size, kind)
        if (
            plan.smem_bytes <= limits.smem_bytes
            and at_once(plan.name, size, plan.threads, plan.smem_bytes) >= M
        ):
            return plan
    return _plan(N, K, spec.WALK_SIZES[-1], kind)


def launch_few_walk(
    kernels: KernelSet, limits: Limits, x: Tensor, gate: Tensor, ffn: FFN, **onto: Unpack[Onto]
) -> Tensor:
    """`[M, K]` and `[M, N]`, the gate of x, to `[M, K]`.

    With `overlap` it starts before the gate product in front of it ends. That must be few_linear's
    then, which lets nothing start before all that came before itself has been written.
    """
    M, N, K = x.shape[0], ffn.N, ffn.K
    plan = plan_few_walk(M, N, K, limits, kernels.clusters_at_once, ffn.kind)
    y = torch.empty_like(x)
    kernels.launch(
        plan.name,
        (M * plan.size,),
        plan.threads,
        {
            "x": x,
            "w_up": ffn.up.values,
            "w_down": ffn.by_neurons,
            "b_up": ffn.up.bias,
            "b_down": ffn.down.bias,
            "gate": gate,
            "residual": onto.get("residual"),
            "columns": plan.columns,
            "N": N,
            "K": K,
            "cap": plan.cap,
            "ways": plan.ways,
            "warps": plan.warps,
            "counts": onto.get("counts"),
            "y": y,
            "up_scale": ffn.up.scales,
            "down_scale": ffn.down.scales,
        },
        plan.smem_bytes,
        overlap=onto.get("overlap", False),
    )
    return y
