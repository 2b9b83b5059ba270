"""The gate product, what fires and up of that for 17 to 64 tokens on Hopper: clusters that cut K.

What few_hidden_hopper does stands in its head; its sizes are repeated here and nowhere else.
"""

from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from .twell_launch import KernelSet, Limits, tensor_map
from .twell_plan import ceil_div
from .twell_weights import FFN

CLUSTER_KERNEL = "few_hidden_hopper"
_HOPPER = (9, 0)
_TOKENS = range(17, 65)  # with fewer few_hidden was as fast
_BLOCK, _RANKS = 256, 4
_SLAB, _ROWS, _MOST_ROWS = 64, 16, 104
_ALIGNMENT = 1024


@dataclass(frozen=True)
class ClusterPlan:
    """One launch: a cluster has 2 `rows` neurons, and room for 8 `octets` tokens."""

    clusters: int
    octets: int
    rows: int
    stages: int
    smem_bytes: int


def takes_clusters(M: int, limits: Limits) -> bool:
    """Whether there may be a plan for `M` tokens on this device."""
    return limits.capability == _HOPPER and M in _TOKENS


@lru_cache(maxsize=4096)
def plan_clusters(M: int, N: int, K: int, limits: Limits, at_once: int) -> ClusterPlan | None:
    """For M tokens, N neurons and inputs of K, where a device runs `at_once` clusters at a time.

    None if there is more to do than that: a second turn would take as long as the first.
    """
    if not takes_clusters(M, limits) or not at_once:
        return None
    octets, slabs = 4 if M <= 32 else 8, ceil_div(K // _SLAB, _RANKS)
    rows = 8 * ceil_div(N, 16 * at_once)
    for stages in range(slabs, 0, -1):
        size = _bytes(slabs, rows, stages, octets)
        if rows <= _MOST_ROWS and size <= limits.smem_bytes:
            return ClusterPlan(ceil_div(N, 2 * rows), octets, rows, stages, size)
    return None


def _bytes(slabs: int, rows: int, stages: int, octets: int) -> int:
    """few_hidden_hopper.cu: Places::bytes."""
    neurons, row_bytes = 2 * rows, 2 * _SLAB
    words = neurons // _ROWS
    ring = slabs * octets * 8 * row_bytes
    sums = ring + max(stages * neurons, _ROWS * slabs) * row_bytes
    gates = sums + neurons * (8 * octets + 4) * 4
    fired = gates + ceil_div(words, _RANKS) * _ROWS * 16 * octets + neurons
    end = fired + 56 + 4 * 64 + 8 * (2 * stages + slabs)
    return max(end, sums + _MOST_ROWS * row_bytes) + _ALIGNMENT


def launch_clusters(
    kernels: KernelSet,
    limits: Limits,
    x: Tensor,
    ffn: FFN,
    made: tuple[Tensor | None, ...],
    *,
    overlap: bool,
) -> bool:
    """Launch few_hidden_hopper, if there is a plan; `made`: hidden, who fired, counts or None."""
    M, N, K = x.shape[0], ffn.N, ffn.K
    if not takes_clusters(M, limits):
        return False
    at_once = kernels.clusters_at_once(CLUSTER_KERNEL, _RANKS, _BLOCK, limits.smem_bytes)
    plan = plan_clusters(M, N, K, limits, at_once)
    if plan is None:
        return False
    kernels.launch(
        CLUSTER_KERNEL,
        (plan.clusters * _RANKS,),
        _BLOCK,
        (
            *(tensor_map(x, 8 * plan.octets), tensor_map(ffn.w_gate, plan.rows)),
            *(ffn.w_up, ffn.w_down, ffn.b_gate, ffn.b_up),
            *(M, N, K, plan.rows, plan.stages, plan.octets, *made),
        ),
        plan.smem_bytes,
        overlap=overlap,
    )
    return True
