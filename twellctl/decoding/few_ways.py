"""The ways of the layers' FFNs in a step of few rows, one kernel after the other."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Unpack

import torch.nn.functional as F
from torch import Tensor, nn

from twellctl.bundle.twell_few import few_gated, few_linear
from twellctl.bundle.twell_format import fires, keep_fired
from twellctl.bundle.twell_fp8 import Fp8Weight, fp8_linear, fp8_products, fp8_weights
from twellctl.bundle.twell_launch import KernelSet
from twellctl.bundle.twell_plan import Limits
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
    """`few_linear` of what it takes, up to OWN_PRODUCTS rows; else PyTorch's product.

    A weight in FP8 has a `scale`; PyTorch's product then rounds x, too. `few_linear` takes weights
    that lie by rows, in bf16 with K a multiple of 64.
    """
    taken = weight.is_contiguous() and (scale is not None or weight.shape[1] % 64 == 0)
    if taken and len(x) <= OWN_PRODUCTS:
        how |= {"scale": scale, "residual": residual}
        return few_linear(kernels, limits, x, weight, bias, **how)
    if scale is not None:
        y = fp8_linear(x, Fp8Weight(weight, scale[:, None], bias))
    else:
        y = F.linear(x, weight, bias)
    return y if residual is None else residual + y


def _hidden(
    kernels: KernelSet, limits: Limits, x: Tensor, ffn: FFN, counts: Tensor | None, overlap: bool
) -> Tensor:
    """The dense hidden state `[M, N]`, by `few_gated` up to OWN_PRODUCTS rows."""
    if len(x) <= OWN_PRODUCTS:
        return few_gated(kernels, limits, x, ffn, counts=counts, overlap=overlap)
    gate, up = _gate_and_up(x, ffn)
    if counts is not None:
        counts += fires(gate).sum(1)
    return keep_fired(gate) * up


def _gate_and_up(x: Tensor, ffn: FFN) -> tuple[Tensor, Tensor]:
    """PyTorch's products; in FP8 of an x that is rounded once for both."""
    if ffn.s_gate is None:
        return F.linear(x, ffn.w_gate, ffn.b_gate), F.linear(x, ffn.w_up, ffn.b_up)
    of_x = fp8_products(x)
    gate, up, _ = fp8_weights(ffn)
    return of_x(gate), of_x(up)


def _dense(kernels: KernelSet, limits: Limits, x: Tensor, ffn: FFN, **onto: Unpack[Onto]) -> Tensor:
    overlap = onto.get("overlap", False)
    hidden = _hidden(kernels, limits, x, ffn, onto.get("counts"), overlap)
    how = {"scale": ffn.s_down, "residual": onto.get("residual"), "overlap": overlap}
    return linear(kernels, limits, hidden, ffn.w_down.t(), ffn.b_down, **how)


def with_activation(activation: nn.Module) -> Way:
    """Over all neurons, bf16, of an FFN with another activation than ReLU. Nothing is counted."""

    def run(
        kernels: KernelSet, limits: Limits, x: Tensor, ffn: FFN, **onto: Unpack[Onto]
    ) -> Tensor:
        product = partial(linear, kernels, limits, overlap=onto.get("overlap", False))
        hidden = activation(product(x, ffn.w_gate, ffn.b_gate)) * product(x, ffn.w_up, ffn.b_up)
        return product(hidden, ffn.w_down.t(), ffn.b_down, residual=onto.get("residual"))

    return replace(DENSE, run=run)


# over all neurons; W_down is read as it lies, in FP8 by rows of K
DENSE = Way("dense", lambda problem: True, _dense, own=False, by_rows=False)
