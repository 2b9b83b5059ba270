"""The ways of the layers' FFNs in a pass over few tokens, one kernel after the other."""

from dataclasses import replace
from functools import partial
from typing import Unpack

import torch
from torch import Tensor, nn

from twellctl.bundle import twell_dense
from twellctl.bundle.twell_few import few_gated, few_linear
from twellctl.bundle.twell_format import fires, keep_fired
from twellctl.bundle.twell_launch import KernelSet
from twellctl.bundle.twell_plan import Limits
from twellctl.bundle.twell_ways import FEW_WAYS, Problem, Way, by_rule
from twellctl.bundle.twell_weights import FFN, Onto, Weight

OWN_PRODUCTS = 32  # with more rows PyTorch's dense products are faster than our own


def few_ways(problem: Problem, density: float | None) -> list[Way]:
    """The ways over what fires that take `problem`, first the one that the rule takes.

    `density` as profiled, of the whole model; None: not known.
    """
    ways = [way for way in FEW_WAYS if way.takes(problem)]
    ruled = by_rule(ways, problem, density)
    return sorted(ways, key=lambda way: way is not ruled)


def linear(
    kernels: KernelSet,
    limits: Limits,
    x: Tensor,
    weight: Weight,
    *,
    residual: Tensor | None = None,
    **how: bool,
) -> Tensor:
    """`few_linear` of what it takes, where that is the faster (`_by_own`); else PyTorch's product.

    PyTorch's product rounds x where the weight is rounded. `few_linear` takes weights that lie by
    rows of K, a multiple of 64.
    """
    taken = weight.values.is_contiguous() and weight.K % 64 == 0
    if taken and _by_own(x, weight):
        return few_linear(kernels, limits, x, weight, residual=residual, **how)
    y = twell_dense.linear(x, weight)
    return y if residual is None else residual + y


def _by_own(x: Tensor, weight: Weight) -> bool:
    """Whether our own product of `x` and `weight` is faster than PyTorch's."""
    return len(x) <= OWN_PRODUCTS or not twell_dense.has_fast_product(x, weight)


def wide_logits(
    kernels: KernelSet, limits: Limits, h: Tensor, head: Weight, at_once: int
) -> Tensor:
    """float32 `[n, V]` of states `[n, K]`; a launch takes `at_once` of them. Not rounded to bf16,
    which would make many tokens equally likely."""
    logits = [
        few_linear(kernels, limits, few, head, wide=True, overlap=True) for few in h.split(at_once)
    ]
    return logits[0] if len(logits) == 1 else torch.cat(logits)


def _hidden(
    kernels: KernelSet, limits: Limits, x: Tensor, ffn: FFN, counts: Tensor | None, overlap: bool
) -> Tensor:
    """The dense hidden state `[M, N]`, by `few_gated` where that is the faster."""
    if _by_own(x, ffn.gate):
        return few_gated(kernels, limits, x, ffn, counts=counts, overlap=overlap)
    of_x = twell_dense.products(x, ffn.kind)  # a rounded kind rounds x once for both
    gate, up = of_x(ffn.gate), of_x(ffn.up)
    if counts is not None:
        counts += fires(gate).sum(1)
    return keep_fired(gate) * up


def _dense(kernels: KernelSet, limits: Limits, x: Tensor, ffn: FFN, **onto: Unpack[Onto]) -> Tensor:
    overlap = onto.get("overlap", False)
    hidden = _hidden(kernels, limits, x, ffn, onto.get("counts"), overlap)
    residual = onto.get("residual")
    return linear(kernels, limits, hidden, ffn.down, residual=residual, overlap=overlap)


def with_activation(activation: nn.Module, *, is_silu: bool) -> Way:
    """Over all neurons, bf16, of an FFN with another activation than ReLU. Nothing is counted.

    `is_silu`: the activation is SiLU, which `few_gated` has, too.
    """

    def run(
        kernels: KernelSet, limits: Limits, x: Tensor, ffn: FFN, **onto: Unpack[Onto]
    ) -> Tensor:
        overlap = onto.get("overlap", False)
        product = partial(linear, kernels, limits, overlap=overlap)
        if is_silu and _by_own(x, ffn.gate):
            hidden = few_gated(kernels, limits, x, ffn, overlap=overlap, is_silu=True)
        else:
            hidden = activation(product(x, ffn.gate)) * product(x, ffn.up)
        return product(hidden, ffn.down, residual=onto.get("residual"))

    return replace(DENSE, run=run)


# over all neurons; W_down is read as it lies, rounded weights by rows of K
DENSE = Way("dense", lambda problem: True, _dense, own=False, by_rows=False)
