"""The TwELL side of a bench: this installation's kernels in a whole model."""

import collections
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from twellctl.bundle import twell_ffn
from twellctl.bundle.twell_choice import WayPlan
from twellctl.bundle.twell_model import (
    gated_ffns,
    lay_weights,
    plan_ways,
    put_over_twell,
    use_kernels,
)
from twellctl.here.own_kernels import own_kernels
from twellctl.models.loading import shared_copy


def why_no_kernels(run: Callable[[], Any], device: torch.device) -> str | None:
    """Try `run`, which asks for kernels on a GPU: None if they ran, else why not."""
    if device.type != "cuda":
        return None
    with twell_ffn.reasons_said() as said:
        run()
    return said[0] if said else None


def ways_taken(twin: nn.Module, tokens: int) -> dict[str, int]:
    """How many layers of `twin`, a model over TwELL, go which way with so many tokens, by a plan
    that was measured."""
    plans = [WayPlan.parse(ffn.twell_plan) for ffn in gated_ffns(twin) if ffn.twell_plan]
    return dict(collections.Counter(plan.name(tokens) for plan in plans))


def twell_twin(model: nn.Module, twell: Mapping[str, Any], route: str) -> nn.Module:
    """`model` over TwELL by the numbers of a "twell" block: a copy that shares its weights.

    Not those of the down projections, where the kernels want another layout of them.
    """
    twin = shared_copy(model)
    put_over_twell(twin, twell)
    use_kernels(twin, own_kernels(), route)
    for ffn in gated_ffns(twin):  # the same numbers, but a layout of its own
        ffn.down_proj.weight = nn.Parameter(ffn.down_proj.weight.detach(), requires_grad=False)
    lay_weights(twin)
    plan_ways(twin)
    return twin
