"""twellctl bench ffn: one gated FFN over TwELL against all that torch has for the dense one.

That is the dense FFN in the dtype of the weights, and in FP8 where the GPU has it.

The inputs are synthetic (`synthetic`). The weights lie in memory several times, and the
calls go through the copies in turn, so that a call finds none of its weights in the L2 cache, as in
a model, whose other layers came in between. The rows are the same for each call: in a model, too,
the norm has just written them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twellctl.bench.contest import (
    Contender,
    Course,
    hold,
    open_course,
    relative_errors,
)
from twellctl.bench.dense_ffn import Ffn, dense_ffns, dense_modes, fresh_compiler, reference
from twellctl.bench.dense_fp8 import (
    BY_ROW,
    Fp8Ffn,
    fp8_contenders,
    fp8_ffns,
    fp8_modes,
    own_error_of,
    through_fp8,
    why_no_dense_fp8,
)
from twellctl.bench.device import device_facts
from twellctl.bench.results import DENSE, TWELL, Bench, Point
from twellctl.bench.settings import FfnSettings
from twellctl.bench.synthetic import (
    FfnWeights,
    make_rows,
    make_weights,
    measure_firing,
    rotated_weights,
    spread_of,
    told,
)
from twellctl.bench.twell_side import (
    as_loaded,
    ffn_over_twell,
    fp8_module,
    require_kernels,
    routes_taken,
    twell_name,
    with_route,
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
REFERENCE_ROWS = 512
PROFILED_ROWS = 8192


def bench_ffn(
    settings: FfnSettings,
    note: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Bench:
    """Measure each density at each token count; `note` is told what comes. Raises `TwellError`."""
    settings.check()
    course = open_course(settings, note, progress)
    without_fp8 = why_no_dense_fp8(
        course.device, DTYPES[settings.dtype], settings.sizes, wanted=settings.dense_fp8
    )
    found: dict[float, list[Point]] = {density: [] for density in settings.densities}
    with torch.no_grad():
        for tokens in settings.tokens:
            with fresh_compiler():
                modes = dense_modes(course.device, settings.max_autotune)
                dense = dense_ffns(modes)
                fp8 = [] if without_fp8 else fp8_ffns(fp8_modes(modes))
                for density, points in found.items():
                    points.append(_point(settings, tokens, density, dense, fp8, course))
    return Bench(
        command="bench ffn",
        facts=device_facts(course.device) | {"without_fp8": without_fp8},
        settings=told(settings),
        groups=tuple((_called(settings, d), tuple(points)) for d, points in found.items()),
    )


@dataclass(frozen=True)
class Inputs:
    """What all candidates compute on, what fires of it, and what a profile would say of that."""

    x: Tensor
    weights: FfnWeights
    fired: dict[str, Any]
    slots: int
    density: float


# by route: the FFN over TwELL with each copy of its weights
Calls = Callable[[str], list[Callable[[Tensor], Tensor]]]


def _point(
    settings: FfnSettings,
    tokens: int,
    density: float,
    dense: dict[str, Ffn],
    fp8: list[Fp8Ffn],
    course: Course,
) -> Point:
    device = course.device
    generator = torch.Generator(device).manual_seed(settings.seed)
    inputs = _inputs(settings, tokens, density, generator)
    rotated = rotated_weights(inputs.weights, device)
    rows = torch.randperm(tokens, generator=generator, device=device)[:REFERENCE_ROWS]
    calls_of = (_bf16_calls if settings.quantize is None else _fp8_calls)(inputs, rotated)
    without_kernels = require_kernels(
        settings.routes, lambda route: calls_of(route)[0](inputs.x[:8]), device
    )
    in_fp8 = settings.quantize is not None
    own_error = own_error_of(BY_ROW, inputs.x, rows, inputs.weights) if in_fp8 else None

    def over_twell(route: str) -> Contender:
        calls, name = calls_of(route), twell_name(route, device, in_fp8)
        return Contender(name, TWELL, lambda number: calls[number](inputs.x), own_error)

    over = [over_twell(route) for route in settings.routes]
    contenders = [
        Contender(name, DENSE, lambda number, ffn=ffn: ffn(inputs.x, rotated[number]))
        for name, ffn in dense.items()
    ]
    contenders += [*fp8_contenders(fp8, inputs.x, rows, rotated), *over]
    expected = reference(inputs.x[rows], inputs.weights)
    outcome = hold(
        course,
        contenders,
        lambda y: relative_errors(y[rows], expected),
        what=f"{tokens} tokens, density {density:g}",
        tokens=tokens,
        num_inputs=len(rotated),
    )
    sizes = (settings.hidden_size, settings.intermediate_size, settings.bias)
    about = inputs.fired | {
        "density_asked": density,
        "density_profiled": inputs.density,
        "slots": inputs.slots,
        "weight_copies": len(rotated),
        "without_kernels": without_kernels,
        "auto_took": routes_taken(*sizes, tokens, [(inputs.slots, inputs.density)], in_fp8),
    }
    explained = {} if in_fp8 else None  # in FP8 its own error has judged it
    return Point(tokens, about, "float64", (over[0].name,), outcome, explained)


def _bf16_calls(inputs: Inputs, copies: list[FfnWeights]) -> Calls:
    loaded = [as_loaded(weights) for weights in copies]

    def calls(route: str) -> list[Callable[[Tensor], Tensor]]:
        run = ffn_over_twell(route, inputs.slots, inputs.density)
        return [lambda x, weights=weights: run(x, weights) for weights in loaded]

    return calls


def _fp8_calls(inputs: Inputs, copies: list[FfnWeights]) -> Calls:
    modules = [fp8_module(weights, inputs.slots, inputs.density) for weights in copies]
    return lambda route: [with_route(module, route) for module in modules]


def _inputs(
    settings: FfnSettings, tokens: int, density: float, generator: torch.Generator
) -> Inputs:
    K, N = settings.hidden_size, settings.intermediate_size
    made = {"dtype": DTYPES[settings.dtype], "generator": generator}
    weights = make_weights(K, N, density, bias=settings.bias, **made)
    if settings.quantize is not None:
        weights = through_fp8(weights, DTYPES[settings.dtype])
    x = make_rows(tokens, K, density, spread_of(settings), **made)
    fired = profiled = measure_firing(x, weights)
    if tokens < PROFILED_ROWS:  # a profile knows the model, and not these few rows
        more = make_rows(PROFILED_ROWS, K, density, spread_of(settings), **made)
        profiled = measure_firing(more, weights)
    slots = settings.slots or profiled["slots"]
    return Inputs(x, weights, fired, slots, profiled["density"])


def _called(settings: FfnSettings, density: float) -> str:
    K, N = settings.hidden_size, settings.intermediate_size
    more = spread_of(settings).describe()
    spread = f" ({more})" if more else ""
    in_fp8 = " in FP8" if settings.quantize else ""
    return f"this FFN of {K} x {N}{in_fp8} at {density:.2%} density{spread}"
