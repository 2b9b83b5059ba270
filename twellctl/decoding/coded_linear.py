"""Linear layers of which codes of 4 bits are all there is, as the kernel of a whole step reads them
(step_int4.py).

Such a step needs no more. All else that goes over a layer expands its weight, for one product
alone: the same numbers in bf16 as of a layer that is expanded when it is loaded. So a model has one
weight in bf16 at a time.
"""

from collections.abc import Iterable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twellctl.bundle.twell_int4 import (
    PackedLinear,
    expand,
    expanded_layer,
    kept_codes,
    kept_group_size,
    pack,
)
from twellctl.bundle.twell_launch import KernelSet, kernels_for
from twellctl.bundle.twell_spec import STEP_QUAD
from twellctl.bundle.twell_weights import Weight, in_one
from twellctl.decoding.step_int4 import (
    by_quads,
    down_by_neurons,
    expand_neurons,
    expand_quads,
    from_neurons,
    from_quads,
)
from twellctl.here.own_kernels import own_kernels

Linear: TypeAlias = nn.Linear | PackedLinear


class CodedLinear(nn.Module):
    """One whose rows lie by quads: `codes` uint8 `[N / 4, bytes]`, groups of `group` inputs."""

    def __init__(
        self, codes: Tensor, bias: Tensor | None, in_features: int, out_features: int, group: int
    ):
        super().__init__()
        self.in_features, self.out_features, self.group = in_features, out_features, group
        self.register_buffer("codes", codes, persistent=False)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.expand(), self.bias)

    def parts(self) -> tuple[Tensor, Tensor]:
        """int8 codes `[N, K]` and scales `[N, K / group]`."""
        return from_quads(self.codes, self.in_features, self.group)

    def expand(self) -> Tensor:
        """The weight `[N, K]`, made anew each time, on a GPU by a kernel."""
        if not self.codes.is_cuda:
            return expand(*self.parts())
        return self._by_kernel(kernels_for(own_kernels(), self.codes.device.index))

    def _by_kernel(self, kernels: KernelSet) -> Tensor:
        return expand_quads(kernels, self.codes, self.in_features, self.group)

    @property
    def expanded(self) -> nn.Linear:
        """As of `PackedLinear`."""
        codes, scales = self.parts()
        return expanded_layer(pack(codes), scales.contiguous(), self.bias)


class CodedDown(CodedLinear):
    """W_down `[K, N]`, whose `codes` lie by neurons, uint8 `[N, K / 2]`, with `scales` bf16
    `[N / group, K]`. N are its inputs, K its outputs."""

    def __init__(self, codes: Tensor, scales: Tensor, bias: Tensor | None, group: int):
        super().__init__(codes, bias, len(codes), scales.shape[1], group)
        self.register_buffer("scales", scales, persistent=False)

    def parts(self) -> tuple[Tensor, Tensor]:
        return from_neurons(self.codes, self.scales)

    def _by_kernel(self, kernels: KernelSet) -> Tensor:
        return expand_neurons(kernels, self.codes, self.scales, self.group).t()


CODED = (PackedLinear, CodedLinear)  # linear layers without a weight in bf16


def linears_of(modules: Iterable[nn.Module]) -> list[Linear | CodedLinear]:
    """All linear layers in `modules`."""
    return [m for of in modules for m in of.modules() if isinstance(m, (nn.Linear, *CODED))]


def group_size(linear: Linear | CodedLinear) -> int | None:
    """How many inputs share a scale; None: it has no codes."""
    return linear.group if isinstance(linear, CodedLinear) else kept_group_size(linear)


def coded_rows(linears: Iterable[Linear | CodedLinear], group: int) -> list[CodedLinear] | None:
    """`linears` of the same inputs with their rows behind one another in memory; themselves if
    they are coded. None if one keeps no codes, or was changed since."""
    linears = list(linears)
    if all(isinstance(linear, CodedLinear) for linear in linears):
        return linears
    kept = [kept_codes(linear) for linear in linears]
    there = [one for one in kept if one is not None]
    if len(there) < len(kept):
        return None
    codes, scales = (torch.cat(part) for part in zip(*there, strict=True))
    laid = by_quads(codes, scales, group)
    pieces = laid.split([linear.out_features // STEP_QUAD for linear in linears])
    return [
        CodedLinear(piece, linear.bias, linear.in_features, linear.out_features, group)
        for piece, linear in zip(pieces, linears, strict=True)
    ]


def coded_down(linear: Linear | CodedDown, group: int) -> CodedDown | None:
    """As `coded_rows`, of W_down."""
    if isinstance(linear, CodedDown):
        return linear
    if (kept := kept_codes(linear)) is None:
        return None
    return CodedDown(*down_by_neurons(*kept, group), linear.bias, group)


def weight_of_rows(linears: list[CodedLinear]) -> Weight:
    """The rows of all `linears` as one weight: views where they lie behind one another."""
    codes = [linear.codes for linear in linears]
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    laid = in_one(*codes)
    return Weight(
        "int4",
        torch.cat(codes) if laid is None else laid,
        bias=torch.cat(biases) if biases else None,
    )


def all_rows(linears: list[CodedLinear]) -> CodedLinear:
    """Of the same inputs: one with the rows of all."""
    weight, first = weight_of_rows(linears), linears[0]
    num_rows = sum(linear.out_features for linear in linears)
    return CodedLinear(weight.values, weight.bias, first.in_features, num_rows, first.group)


def expand_layers(model: nn.Module) -> None:
    """Give each linear layer that is codes alone its weight; it keeps the codes."""
    for name, layer in [(name, m) for name, m in model.named_modules() if isinstance(m, CODED)]:
        model.set_submodule(name, layer.expanded)
