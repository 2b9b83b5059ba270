"""twellctl bench decode --ffn: one gated FFN for few tokens, dense and over TwELL.

Inputs are synthetic (`synthetic`). Calls go through copies of the weights in turn, a dozen
at least, so that none lie in the L2 cache, as in a model; on a GPU a CUDA graph of a call for each
copy is replayed. Beside each time stands its floor: the bytes that must be read, at the speed at
which this device copies.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twellctl.bench.contest import (
    Contender,
    Course,
    check_course,
    hold,
    open_course,
    relative_errors,
)
from twellctl.bench.decode_forms import (
    FewWeights,
    copy_bandwidth,
    few_forms,
    few_weights,
    ffn_bytes,
    why_no_few,
)
from twellctl.bench.dense_ffn import reference
from twellctl.bench.device import bench_device, device_facts
from twellctl.bench.results import DENSE, TWELL, Bench, Point
from twellctl.bench.synthetic import (
    EVEN,
    FfnWeights,
    check_sizes,
    check_union,
    make_rows,
    make_weights,
    rotated_weights,
)
from twellctl.bundle.twell_few import FEW_TOKENS
from twellctl.errors import UsageError
from twellctl.firing.counts import Union, UnionCount

COPIES = 12  # at least, where the memory allows
COUNTED_ROWS = 8192
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class DecodeFfnSettings:
    """What to measure: each density at each of `batches`, tokens of one step."""

    hidden_size: int = 2048
    intermediate_size: int = 5632
    batches: tuple[int, ...] = (1, 4, 16, 64)
    densities: tuple[float, ...] = (0.005, 0.05)
    rounds: int = 11
    seed: int = 0
    device: str | None = None

    def check(self) -> None:
        """`UsageError` for what makes no sense, before any work."""
        check_sizes(self.hidden_size, self.intermediate_size)
        if bad := [batch for batch in self.batches if not 1 <= batch <= FEW_TOKENS]:
            raise UsageError(f"batch must be 1 to {FEW_TOKENS}, got {bad[0]}")
        for density in self.densities:
            EVEN.check(density)
        check_course(self.rounds, 1.0)


def bench_decode_ffn(
    settings: DecodeFfnSettings,
    note: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Bench:
    """Measure each density at each batch; `note` is told what comes. Raises `TwellError`."""
    settings.check()
    device = bench_device(settings.device)
    course = open_course(device, settings.rounds, None, note, progress)
    with torch.no_grad():
        note("the device's copy bandwidth")
        bandwidth = copy_bandwidth(device)
        groups = tuple(
            (_called(settings, density), _points(settings, density, bandwidth, course))
            for density in settings.densities
        )
    return Bench(
        command="bench decode --ffn",
        facts=device_facts(device) | {"bandwidth_gb_s": bandwidth / 1e9},
        settings=asdict(settings),
        groups=groups,
    )


def _points(
    settings: DecodeFfnSettings, density: float, bandwidth: float, course: Course
) -> tuple[Point, ...]:
    K, N = settings.hidden_size, settings.intermediate_size
    generator = torch.Generator(course.device).manual_seed(settings.seed)
    made = {"dtype": DTYPE, "generator": generator}
    weights = make_weights(K, N, density, bias=False, **made)
    check_union(_union(make_rows(COUNTED_ROWS, K, density, EVEN, **made), weights))
    copies = rotated_weights(weights, course.device, COPIES)
    rotated = [few_weights(*w.split, density=density) for w in copies]
    points = []
    for M in settings.batches:
        x = make_rows(M, K, density, EVEN, **made)
        points.append(_point(x, weights, rotated, density, bandwidth, course))
    return tuple(points)


def _point(
    x: Tensor,
    weights: FfnWeights,
    rotated: list[FewWeights],
    density: float,
    bandwidth: float,
    course: Course,
) -> Point:
    (M, K), N = x.shape, len(weights.gate_up) // 2
    without_kernels = why_no_few(M, N, course.device)
    forms = few_forms(course.device, with_kernels=without_kernels is None)
    contenders = [
        Contender(name, kind, lambda number, form=form: form(x, rotated[number]))
        for name, (kind, form) in forms.items()
    ]
    expected = reference(x, weights)
    outcome = hold(
        course,
        contenders,
        lambda y: relative_errors(y, expected),
        what=f"{M} tokens, density {density:g}",
        tokens=M,
        num_inputs=len(rotated),
    )
    fired = _fired(x, weights)
    union = float(fired.any(0).float().mean())
    floors = {DENSE: ffn_bytes(K, N, x.itemsize), TWELL: ffn_bytes(K, N, x.itemsize, union)}
    about: dict[str, Any] = {
        "density": float(fired.float().mean()),
        "density_asked": density,
        "fired_for_some_token": union,
        "weight_copies": len(rotated),
        "without_kernels": without_kernels if course.device.type == "cuda" else None,
        "floor_bytes": floors,
        "floor_ms": {kind: 1000 * count / bandwidth for kind, count in floors.items()},
    }
    headline = next(c.name for c in contenders if c.kind == TWELL)
    return Point(M, about, "float64", (headline,), outcome)


def _fired(x: Tensor, weights: FfnWeights) -> Tensor:
    """`[M, N]`, which neurons fire."""
    return F.linear(x, weights.split[0]) > 0


def _union(x: Tensor, weights: FfnWeights) -> Union:
    fired, count = _fired(x, weights), UnionCount()
    count.add(fired)
    return count.summary(float(fired.float().mean()))


def _called(settings: DecodeFfnSettings, density: float) -> str:
    K, N = settings.hidden_size, settings.intermediate_size
    return f"this FFN of {K} x {N} at {density:.2%} density"
