"""The ways of the layers' FFNs in a step of few rows, one kernel after the other."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twellctl.bundle.twell_e4m3 import dense_e4m3_ffn, dense_e4m3_linear
from twellctl.bundle.twell_few import few_gated, few_linear
from twellctl.bundle.twell_format import fires, keep_fired
from twellctl.bundle.twell_fp8 import Fp8Weight
from twellctl.bundle.twell_launch import KernelSet
from twellctl.bundle.twell_plan import Limits
from twellctl.bundle.twell_reasons import takes_hopper_kernels
from twellctl.bundle.twell_ways import FEW_WAYS, Problem, Way, by_rule, ways_of
from twellctl.bundle.twell_weights import FFN, Onto

OWN_PRODUCTS = 32  # with more rows PyTorch's dense products are faster than our own


def few_ways(problem: Problem, densities: Sequence[float | None]) -> dict[str, list[Way]]:
    """The way of each layer's FFN, by form: first by rule, then each way for all.

    `densities` as profiled, of each layer; None: not known.
    """
    ways = [way for way in FEW_WAYS if way.takes(problem)]
    ruled = [by_rule(ways_of("twell", problem), problem, density) for density in densities]
    name = " and ".join(dict.fromkeys(way.name for way in ruled))
    return {name: ruled} | {way.name: [way] * len(densities) for way in ways}


def by_torch(x: Tensor, scale: Tensor | None) -> bool:
    """Whether PyTorch's product of `x` is faster than few_linear's; a weight in FP8 has a `scale`.

    That of FP8 is where a kernel rounds `x`.
    """
    if len(x) <= OWN_PRODUCTS:
        return False
    return scale is None or takes_hopper_kernels(x.device.index)


def linear(
    kernels: KernelSet,
    limits: Limits,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    residual: Tensor | None = None,
    **how: bool,
) -> Tensor:
    """`few_linear`, or PyTorch's product where that is faster, or over bf16 K no multiple of 64."""
    taken = scale is not None or weight.shape[1] % 64 == 0
    if taken and not by_torch(x, scale):
        how |= {"scale": scale, "residual": residual}
        return few_linear(kernels, limits, x, weight, bias, **how)
    if scale is not None:
        return dense_e4m3_linear(kernels, x, Fp8Weight(weight, scale[:, None], bias), residual)
    y = F.linear(x, weight, bias)
    return y if residual is None else residual + y


def _hidden(
    kernels: KernelSet, limits: Limits, x: Tensor, ffn: FFN, counts: Tensor | None, overlap: bool
) -> Tensor:
    """The dense hidden state `[M, N]`, in bf16 by either, over FP8 weights by `few_gated`."""
    if ffn.s_gate is not None or not by_torch(x, None):
        return few_gated(kernels, limits, x, ffn, counts=counts, overlap=overlap)
    gate = F.linear(x, ffn.w_gate, ffn.b_gate)
    if counts is not None:
        counts += fires(gate).sum(1)
    return keep_fired(gate) * F.linear(x, ffn.w_up, ffn.b_up)


def _by_columns(
    kernels: KernelSet, limits: Limits, x: Tensor, ffn: FFN, **onto: Unpack[Onto]
) -> Tensor:
    residual, counts = onto.get("residual"), onto.get("counts")
    overlap = onto.get("overlap", False)
    if ffn.s_gate is not None and by_torch(x, ffn.s_gate):
        by_columns = replace(ffn, w_down=ffn.w_down.t())
        return dense_e4m3_ffn(kernels, limits, x, by_columns, residual=residual, counts=counts)
    hidden = _hidden(kernels, limits, x, ffn, counts, overlap)
    how = {"scale": ffn.s_down, "residual": residual, "overlap": overlap}
    return linear(kernels, limits, hidden, ffn.w_down, ffn.b_down, **how)


def _in_place(
    kernels: KernelSet, limits: Limits, x: Tensor, ffn: FFN, **onto: Unpack[Onto]
) -> Tensor:
    hidden = _hidden(kernels, limits, x, ffn, onto.get("counts"), onto.get("overlap", False))
    added = [tensor for tensor in (onto.get("residual"), ffn.b_down) if tensor is not None]
    return torch.addmm(sum(added), hidden, ffn.w_down) if added else hidden @ ffn.w_down


def with_activation(activation: nn.Module) -> Way:
    """Over all neurons, bf16, of an FFN with another activation than ReLU. Nothing is counted."""

    def run(
        kernels: KernelSet, limits: Limits, x: Tensor, ffn: FFN, **onto: Unpack[Onto]
    ) -> Tensor:
        product = partial(linear, kernels, limits, overlap=onto.get("overlap", False))
        hidden = activation(product(x, ffn.w_gate, ffn.b_gate)) * product(x, ffn.w_up, ffn.b_up)
        return product(hidden, ffn.w_down, ffn.b_down, residual=onto.get("residual"))

    return replace(BY_COLUMNS, run=run)


# over all neurons, with a W_down that lies as an nn.Linear's
BY_COLUMNS = Way("dense", lambda problem: True, _by_columns, own=False, by_rows=False)
# the same with the W_down that is there: slower for small models
IN_PLACE = Way("dense in place", lambda problem: True, _in_place, own=False)
