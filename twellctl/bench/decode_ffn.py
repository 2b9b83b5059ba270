"""twellctl bench decode --ffn: one gated FFN for few tokens, dense and over TwELL.

Dense in bf16 and, where the GPU has it, in FP8; over TwELL in one of them.

Inputs are synthetic (`synthetic`). Calls go through copies of the weights in turn, a dozen
at least, so that none lie in the L2 cache, as in a model; on a GPU a CUDA graph of a call for each
copy is replayed. Beside each time stands its floor: the bytes that must be read, at the speed at
which this device copies.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twellctl.bench.contest import (
    Contender,
    Course,
    hold,
    open_course,
    relative_error,
    relative_errors,
)
from twellctl.bench.decode_forms import (
    FewWeights,
    copy_bandwidth,
    few_forms,
    few_weights,
    ffn_bytes,
    rounded_weights,
    why_no_few,
)
from twellctl.bench.dense_ffn import dense_ffns, dense_modes, fresh_compiler, reference
from twellctl.bench.dense_fp8 import (
    fp8_contenders,
    fp8_ffns,
    fp8_modes,
    through_fp8,
    why_no_dense_fp8,
)
from twellctl.bench.device import device_facts
from twellctl.bench.results import DENSE, DENSE_FP8, FEW_DENSE_FP8, TWELL, Bench, Point
from twellctl.bench.settings import DecodeFfnSettings
from twellctl.bench.synthetic import (
    EVEN,
    FfnWeights,
    check_union,
    make_rows,
    make_weights,
    rotated_weights,
)
from twellctl.firing.counts import Union, UnionCount

COPIES = 12  # at least, where the memory allows
COUNTED_ROWS = 8192
DTYPE = torch.bfloat16


def bench_decode_ffn(
    settings: DecodeFfnSettings,
    note: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Bench:
    """Measure each density at each batch; `note` is told what comes. Raises `TwellError`."""
    settings.check()
    course = open_course(settings, note, progress)
    without_fp8 = why_no_dense_fp8(course.device, DTYPE, settings.sizes, wanted=settings.dense_fp8)
    with torch.no_grad():
        note("the device's copy bandwidth")
        bandwidth = copy_bandwidth(course.device)
        groups = tuple(
            (
                _called(settings, density),
                _points(settings, density, bandwidth, without_fp8 is None, course),
            )
            for density in settings.densities
        )
    facts = {"bandwidth_gb_s": bandwidth / 1e9, "without_fp8": without_fp8}
    return Bench(
        command="bench decode --ffn",
        facts=device_facts(course.device) | facts,
        settings=asdict(settings),
        groups=groups,
    )


@dataclass(frozen=True)
class Weights:
    """One FFN, in copies: `copies` for the forms that torch compiles, `few` for all others.

    `density` is what a profile would tell. `in_fp8`: TwELL runs over FP8 weights; `has_fp8`: dense
    FP8 is a rival.
    """

    copies: list[FfnWeights]
    few: list[FewWeights]
    density: float
    in_fp8: bool
    has_fp8: bool


def _points(
    settings: DecodeFfnSettings, density: float, bandwidth: float, has_fp8: bool, course: Course
) -> tuple[Point, ...]:
    K, N, in_fp8 = settings.hidden_size, settings.intermediate_size, settings.quantize is not None
    generator = torch.Generator(course.device).manual_seed(settings.seed)
    made = {"dtype": DTYPE, "generator": generator}
    weights = make_weights(K, N, density, bias=False, **made)
    if in_fp8:
        weights = through_fp8(weights, DTYPE)
    check_union(_union(make_rows(COUNTED_ROWS, K, density, EVEN, **made), weights))
    copies = rotated_weights(weights, course.device, COPIES)
    few = [few_weights(*w.split, density=density) for w in copies]
    if has_fp8 or in_fp8:
        few = [replace(w, fp8=rounded_weights(w)) for w in few]
    of_all = Weights(copies, few, density, in_fp8, has_fp8)
    rows = (make_rows(M, K, density, EVEN, **made) for M in settings.batches)
    return tuple(_point(x, of_all, bandwidth, course) for x in rows)


def _point(x: Tensor, weights: Weights, bandwidth: float, course: Course) -> Point:
    (M, K), one = x.shape, weights.copies[0]
    N = len(one.gate_up) // 2
    without_kernels = _why_no_kernels(M, weights, course.device)
    with fresh_compiler():
        contenders = [
            *_few_contenders(x, weights, without_kernels is None, course.device),
            *_torch_contenders(x, weights, course.device),
        ]
        contenders.sort(key=lambda c: (DENSE, DENSE_FP8, TWELL).index(c.kind))
        expected = reference(x, one)
        outcome = hold(
            course,
            contenders,
            lambda y: relative_errors(y, expected),
            what=f"{M} tokens, density {weights.density:g}",
            tokens=M,
            num_inputs=len(weights.copies),
        )
    if without_kernels is None and (said := _why_no_few_fp8(M, weights, course.device)):
        outcome = replace(outcome, skipped=outcome.skipped | {FEW_DENSE_FP8: said})
    fired = _fired(x, one)
    union = float(fired.any(0).float().mean())
    floors = {
        DENSE: ffn_bytes(K, N, x.itemsize),
        DENSE_FP8: ffn_bytes(K, N, 1),
        TWELL: ffn_bytes(K, N, 1 if weights.in_fp8 else x.itemsize, union),
    }
    about: dict[str, Any] = {
        "density": float(fired.float().mean()),
        "density_asked": weights.density,
        "fired_for_some_token": union,
        "weight_copies": len(weights.copies),
        "without_kernels": without_kernels if course.device.type == "cuda" else None,
        "floor_bytes": floors,
        "floor_ms": {kind: 1000 * count / bandwidth for kind, count in floors.items()},
    }
    headline = next(c.name for c in contenders if c.kind == TWELL)
    return Point(M, about, "float64", (headline,), outcome)


def _why_no_kernels(M: int, weights: Weights, device: torch.device) -> str | None:
    """None if TwELL goes by the kernels, else why it does not."""
    one = weights.few[0]
    found = [why_no_few(M, w, device) for w in (one.all if weights.in_fp8 else [one])]
    return next((said for said in found if said), None)


def _why_no_few_fp8(M: int, weights: Weights, device: torch.device) -> str | None:
    """None if the kernels' own dense form in FP8 is a rival, or none was wanted, else why not."""
    return why_no_few(M, weights.few[0].fp8, device) if weights.has_fp8 else None


def _few_contenders(
    x: Tensor, weights: Weights, with_kernels: bool, device: torch.device
) -> list[Contender]:
    """TwELL, and the dense forms that are not compiled by torch."""
    few = weights.few
    dense_fp8 = weights.has_fp8 and _why_no_few_fp8(len(x), weights, device) is None
    how = {"with_kernels": with_kernels, "dense_fp8": dense_fp8, "twell_in_fp8": weights.in_fp8}

    def own_error(y: Tensor) -> float:
        return relative_error(y, reference(x, through_fp8(weights.copies[0], torch.float64)))

    return [
        Contender(
            name,
            kind,
            lambda number, form=form: form(x, few[number]),
            own_error if kind == DENSE_FP8 else None,
        )
        for name, (kind, form) in few_forms(device, **how).items()
    ]


def _torch_contenders(x: Tensor, weights: Weights, device: torch.device) -> list[Contender]:
    """The dense forms that torch compiles, in bf16 and in FP8."""
    modes, copies = dense_modes(device, max_autotune=False), weights.copies
    contenders = [
        Contender(name, DENSE, lambda number, ffn=ffn: ffn(x, copies[number]))
        for name, ffn in dense_ffns([mode for mode in modes if mode != "eager"]).items()
    ]
    if weights.has_fp8:
        rows = torch.arange(len(x), device=device)
        contenders += fp8_contenders(fp8_ffns(fp8_modes(modes)), x, rows, copies)
    return contenders


def _fired(x: Tensor, weights: FfnWeights) -> Tensor:
    """`[M, N]`, which neurons fire."""
    return F.linear(x, weights.split[0]) > 0


def _union(x: Tensor, weights: FfnWeights) -> Union:
    fired, count = _fired(x, weights), UnionCount()
    count.add(fired)
    return count.summary(float(fired.float().mean()))


def _called(settings: DecodeFfnSettings, density: float) -> str:
    K, N = settings.hidden_size, settings.intermediate_size
    in_fp8 = " in FP8" if settings.quantize else ""
    return f"this FFN of {K} x {N}{in_fp8} at {density:.2%} density"
