"""Which way each FFN goes in a serving engine: a plan, made before anything is served.

An engine warms up with tokens that are not like real ones, and captures graphs in which nothing can
be loaded or measured. So kernels are loaded, and the ways of every number of tokens are measured,
when the weights are there: over random weights of the same shapes that fire as the profile says.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch
from torch import Tensor

from twellctl.bundle.twell_choice import WayPlan
from twellctl.bundle.twell_config import requested
from twellctl.bundle.twell_measured import Sizes, plan_of_ffn
from twellctl.bundle.twell_reasons import why_no_kernels, why_not_sizes
from twellctl.bundle.twell_ways import WAYS, Way

_DENSE = {way.name for way in WAYS if not way.own}
_BY_THE_ENGINE = "densely, by vLLM's own FP8 linear layers"


@dataclass(frozen=True)
class Layer:
    """One FFN of an engine; its numbers as in an export's "twell" block."""

    sizes: Sizes
    tile: int
    slots: int
    density: float


@dataclass(frozen=True)
class Planned:
    """Plans of FFNs by their sizes, none if all go densely; and how they go and why, in words."""

    how: str
    plans: Mapping[Sizes, WayPlan] = field(default_factory=dict)


def engines_way(dense: Callable[[], Tensor]) -> Way:
    """The dense way of FP8 weights: `dense` computes y `[M, K]` of the x at hand, as vLLM does."""
    return Way(
        "dense",
        takes=lambda problem: True,
        run=lambda *problem: dense(),
        own=False,
        by_rows=False,
    )


def plan_layers(
    layers: Sequence[Layer],
    most: int,
    device: torch.device,
    dtype: torch.dtype,
    sources: str,
    dense: Callable[[Tensor], Way] | None = None,
    engine: str = "",
) -> Planned:
    """Load the kernels and measure all ways of `layers`, for up to `most` tokens at a time.

    Layers of the same sizes go by one plan, made for the mean of their densities. `dtype`: of their
    inputs. `sources` as `sparse_ffn` takes it. `dense`: makes the `engines_way` of x, of FFNs of
    these sizes, if their weights are FP8; None for bf16. `engine`: whose dense products these are.
    """
    whys = (_why_no_kernels(layer, device, dtype, sources) for layer in layers)
    if (said := next(filter(None, whys), None)) is not None:
        if dense is not None:
            return densely_in_fp8(said)
        return Planned(f"densely, in plain PyTorch: {said}")
    if (route := requested("auto")) == "dense":
        return Planned("densely, as TWELL_ROUTE says")
    plans = {}
    for sizes in dict.fromkeys(layer.sizes for layer in layers):
        alike = [layer for layer in layers if layer.sizes == sizes]
        density, slots = fmean(one.density for one in alike), max(one.slots for one in alike)
        plans[sizes] = plan_of_ffn(
            sizes, density, slots, device, sources, route, most=most, dense=dense, engine=engine
        )
    if all(_DENSE.issuperset(plan.names) for plan in plans.values()):
        return Planned("densely, which was measured to be the fastest for every number of tokens")
    said = "; ".join(dict.fromkeys(map(str, plans.values())))
    return Planned(f"by numbers of tokens, as measured: {said}", plans)


def densely_in_fp8(why: str) -> Planned:
    """FP8 weights, of which the kernels take none: `why`."""
    return Planned(f"{_BY_THE_ENGINE}: {why}")


def _why_no_kernels(
    layer: Layer, device: torch.device, dtype: torch.dtype, sources: str
) -> str | None:
    """None if the kernels run on `device` and take `layer`, else why not."""
    if device.type != "cuda":
        return "the kernels need an NVIDIA GPU"
    if dtype != torch.bfloat16:
        return f"the kernels take bf16, not {str(dtype).removeprefix('torch.')}"
    K, N, kind = layer.sizes.K, layer.sizes.N, layer.sizes.kind
    said = why_not_sizes(K, N, kind, layer.tile, device.index)
    return said or why_no_kernels(sources, device.index, kind)
