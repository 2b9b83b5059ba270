"""The plan of an FFN, measured when a model is opened, on made-up weights of its sizes.

They fire as a profile of the model says (twell_synthetic.py). What was measured once is kept.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from .twell_choice import WayPlan, density_bucket, measure_by_turns, measured_plan
from .twell_dense import rounded_weight
from .twell_launch import device_limits, kernels_for
from .twell_synthetic import make_rows, make_weights
from .twell_ways import Problem, Way, run_way, tops_of, ways_of
from .twell_weights import FFN, plain_weight


@dataclass(frozen=True)
class Sizes:
    """Of FFNs that go by one plan: inputs of K, N neurons. `biases`: of gate and up, and of down.

    `kind`: of the weights (twell_spec.KINDS).
    """

    K: int
    N: int
    biases: tuple[bool, bool]
    kind: str = "bf16"


def plan_of_ffn(
    sizes: Sizes,
    density: float,
    slots: int,
    device: torch.device,
    sources: str,
    route: str,
    *,
    most: int | None = None,
    dense: Callable[[Tensor], Way] | None = None,
    engine: str = "",
) -> WayPlan:
    """The fastest of the ways of `route` on this GPU, as kept or as measured now.

    `density`: the share of the neurons that fires; `slots` of a tile. `most`: tokens that will come
    at a time; None: any number. `sources`: of kernels that are loaded. `dense`: of an `engine`,
    makes of x the way that stands in for dense products.
    """
    index, limits = device.index, device_limits(device.index)
    problem = Problem(1, sizes.N, sizes.K, limits, kind=sizes.kind)
    tops = [top for top in tops_of(problem) if most is None or top < 2 * most]
    ways = {top: ways_of(route, replace(problem, M=top)) for top in tops}
    made: list[tuple[Tensor, FFN]] = []  # once, and only if something is measured

    def measure(top: int) -> dict[str, float]:
        if not made:
            made.append(_made_up(sizes, density, device, tops[-1]))
        x, ffn = made[0][0][:top], made[0][1]
        here = kernels_for(sources, index), limits
        of_engine = None if dense is None else dense(x)
        with torch.cuda.device(index):
            return measure_by_turns(
                {
                    way.name: partial(run_way, way, here, x, ffn, slots, of_engine)
                    for way in ways[top]
                }
            )

    key = (
        f"{torch.cuda.get_device_name(index)} {sizes} density={density_bucket(density)} "
        f"slots={slots} {sources[:12]}{engine and f' in {engine}'}"
    )
    names = {top: [way.name for way in ways[top]] for top in tops}
    return measured_plan(key, names, measure)


@torch.no_grad()
def _made_up(sizes: Sizes, density: float, device: torch.device, M: int) -> tuple[Tensor, FFN]:
    """Inputs `[M, K]` in bf16, and weights as the kernels read them, whose neurons fire for them at
    `density`."""
    generator = torch.Generator(device).manual_seed(0)
    how = {"dtype": torch.bfloat16, "generator": generator}
    density = min(max(density, 1e-4), 1.0)
    made = make_weights(sizes.K, sizes.N, density, bias=any(sizes.biases), **how)
    w_gate, w_up, w_down, b_gate, b_up, b_down = made.split
    in_gate, in_down = sizes.biases
    biases = (b_gate if in_gate else None, b_up if in_gate else None, b_down if in_down else None)
    pairs = zip((w_gate, w_up, w_down), biases, strict=True)
    if sizes.kind == "bf16":
        gate, up, down = (plain_weight(*pair) for pair in pairs)
        laid = down.values.t().contiguous().t()
        ffn = FFN(gate, up, replace(down, values=laid))
    else:
        gate, up, down = (rounded_weight(sizes.kind, *pair) for pair in pairs)
        ffn = FFN(gate, up, down, down.values.t().contiguous())
    return make_rows(M, sizes.K, **how), ffn
