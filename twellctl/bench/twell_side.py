"""The TwELL side of a bench: this installation's kernels in a whole model."""

import collections
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from twellctl.bench.timing import GRAPHS_BELOW
from twellctl.bundle import twell_ffn, twell_route
from twellctl.bundle.twell_model import gated_ffns, lay_weights, put_over_twell, use_kernels
from twellctl.here.own_kernels import own_kernels
from twellctl.models.loading import shared_copy


def why_no_kernels(run: Callable[[], Any], device: torch.device) -> str | None:
    """Try `run`, which asks for kernels on a GPU: None if they ran, else why not."""
    if device.type != "cuda":
        return None
    with twell_ffn.reasons_said() as said:
        run()
    return said[0] if said else None


def routes_taken(twin: nn.Module, tokens: int) -> dict[str, int]:
    """How many layers of `twin`, a model over TwELL, "auto" sends which way at so many tokens."""
    taken: collections.Counter[str] = collections.Counter()
    for ffn in gated_ffns(twin):
        K, N = ffn.down_proj.weight.shape
        density = ffn.twell_density
        bucket = None if density is None else twell_route.density_bucket(density)
        biases = ffn.down_proj.bias is not None
        asked = (K, N, biases, twell_route.token_bucket(tokens), bucket, ffn.twell_slots)
        for kind, choice in twell_ffn.known_choices().items():
            known = (kind.K, kind.N, kind.biases, kind.tokens, kind.density, kind.slots)
            if known == asked and "dense" in kind.ways:  # there are others of the route twell
                taken[choice.graph if tokens < GRAPHS_BELOW else choice.eager] += 1
    return dict(taken)


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
    return twin
