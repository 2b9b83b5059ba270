"""The ways of the layers' FFNs in a step of few rows, one kernel after the other."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from twellctl.bundle.twell_few import few_gated, few_linear
from twellctl.bundle.twell_few_walk import LINEAR_TOKENS
from twellctl.bundle.twell_ffn import rounded_linear
from twellctl.bundle.twell_format import fires, keep_fired
from twellctl.bundle.twell_fp8 import Fp8Weight
from twellctl.bundle.twell_launch import KernelSet, Limits
from twellctl.bundle.twell_ways import FEW_WAYS, Problem, Way, by_rule, ways_of
from twellctl.bundle.twell_weights import FFN
from twellctl.here.own_kernels import own_kernels


def few_ways(problem: Problem, densities: Sequence[float | None]) -> dict[str, list[Way]]:
    """The way of each layer's FFN, by form: first by rule, then each way for all.

    `densities` as profiled, of each layer; None: not known.
    """
    ways = [way for way in FEW_WAYS if way.takes(problem)]
    ruled = [by_rule(ways_of("twell", problem), problem, density) for density in densities]
    name = " and ".join(dict.fromkeys(way.name for way in ruled))
    return {name: ruled} | {way.name: [way] * len(densities) for way in ways}


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """PyTorch's, `[M, K]` and `[N, K]` to `[M, N]`; a weight with a `scale` `[N]` is e4m3."""
    if scale is None:
        return F.linear(x, weight, bias)
    return rounded_linear(x, Fp8Weight(weight, scale[:, None], bias), own_kernels())


def _hidden(
    kernels: KernelSet, limits: Limits, x: Tensor, ffn: FFN, counts: Tensor | None, overlap: bool
) -> Tensor:
    """The dense hidden state `[M, N]`."""
    if len(x) <= LINEAR_TOKENS:
        return few_gated(kernels, limits, x, ffn, counts=counts, overlap=overlap)
    gate = product(x, ffn.w_gate, ffn.b_gate, ffn.s_gate)
    if counts is not None:
        counts += fires(gate).sum(1)
    return keep_fired(gate) * product(x, ffn.w_up, ffn.b_up, ffn.s_up)


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
    hidden = _hidden(kernels, limits, x, ffn, counts, overlap)
    if len(x) > LINEAR_TOKENS or ffn.N % 64:  # which few_linear does not take
        return residual + product(hidden, ffn.w_down, ffn.b_down, ffn.s_down)
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
    hidden = _hidden(kernels, limits, x, ffn, counts, overlap)
    return torch.addmm(
        residual if ffn.b_down is None else residual + ffn.b_down, hidden, ffn.w_down
    )


# over all neurons, with a W_down that lies as an nn.Linear's
BY_COLUMNS = Way("dense", lambda problem: True, _by_columns, own=False, by_rows=False)
# the same with the W_down that is there: slower for small models
IN_PLACE = Way("dense in place", lambda problem: True, _in_place, own=False)
