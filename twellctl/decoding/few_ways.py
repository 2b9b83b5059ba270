"""The ways of the layers' FFNs in a step of few rows, one kernel after the other."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from twellctl.bundle.twell_few import few_gated, few_linear
from twellctl.bundle.twell_launch import KernelSet, Limits
from twellctl.bundle.twell_ways import FEW_WAYS, Problem, Way, by_rule, ways_of
from twellctl.bundle.twell_weights import FFN


def few_ways(problem: Problem, densities: Sequence[float | None]) -> dict[str, list[Way]]:
    """The way of each layer's FFN, by form: first by rule, then each way for all.

    `densities` as profiled, of each layer; None: not known.
    """
    ways = [way for way in FEW_WAYS if way.takes(problem)]
    ruled = [by_rule(ways_of("twell", problem), problem, density) for density in densities]
    name = " and ".join(dict.fromkeys(way.name for way in ruled))
    return {name: ruled} | {way.name: [way] * len(densities) for way in ways}


def _by_columns(
    kernels: KernelSet,
    limits: Limits,
    x: Tensor,
    ffn: FFN,
    *,
    residual: Tensor,
    counts: Tensor | None,
    overlap: bool,
) -> Tensor:
    hidden = few_gated(kernels, limits, x, ffn, counts=counts, overlap=overlap)
    if ffn.N % 64:  # more than few_linear takes
        return residual + F.linear(hidden, ffn.w_down, ffn.b_down)
    how = {"residual": residual, "overlap": overlap}
    return few_linear(kernels, limits, hidden, ffn.w_down, ffn.b_down, scale=ffn.s_down, **how)


def _in_place(
    kernels: KernelSet,
    limits: Limits,
    x: Tensor,
    ffn: FFN,
    *,
    residual: Tensor,
    counts: Tensor | None,
    overlap: bool,
) -> Tensor:
    hidden = few_gated(kernels, limits, x, ffn, counts=counts, overlap=overlap)
    return torch.addmm(
        residual if ffn.b_down is None else residual + ffn.b_down, hidden, ffn.w_down
    )


# over all neurons, with a W_down that lies as an nn.Linear's
BY_COLUMNS = Way("dense", lambda problem: True, _by_columns, own=False, by_rows=False)
# the same with the W_down that is there: slower for small models
IN_PLACE = Way("dense in place", lambda problem: True, _in_place, own=False)
