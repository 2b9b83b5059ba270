"""twellctl bench ffn: one gated FFN over TwELL against all that torch has for the dense one.

The inputs are synthetic (`twellctl.synthetic`). The weights lie in memory several times, and the
calls go through the copies in turn, so that a call finds none of its weights in the L2 cache, as in
a model, whose other layers came in between. The rows are the same for each call: in a model, too,
the norm has just written them.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twellctl.bench_device import bench_device, device_facts
from twellctl.bench_results import DENSE, TWELL, Bench, Candidate, Point
from twellctl.bundle.twell_config import MAX_COLUMNS, TILE
from twellctl.dense_ffn import MODES, DenseFfn, dense_ffns, fresh_compiler
from twellctl.energy import Counter, energy_by_turns, open_counter
from twellctl.errors import TwellError, UsageError
from twellctl.firing import LayerCount, UnionCount
from twellctl.machine import line
from twellctl.synthetic import (
    EVEN,
    FfnWeights,
    Spread,
    as_json,
    check_union,
    make_rows,
    make_weights,
)
from twellctl.timing import GRAPHS_BELOW, Timer, by_turns
from twellctl.twell_side import check_routes, failed, twell_ffn, twell_name

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
REFERENCE_ROWS = 512
COUNTED_ROWS = 8192  # at once; a multiple of 128
CACHES = 3  # the gates of all copies of the weights together, in sizes of the L2 cache
MAX_COPIES = 64

Note = Callable[[str], None]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class FfnSettings:
    """What to measure. `slots` None are those that `twellctl profile` would choose."""

    hidden_size: int = 2048
    intermediate_size: int = 5632
    tokens: tuple[int, ...] = (131072, 2048, 256)
    densities: tuple[float, ...] = (0.005, 0.01, 0.02)
    spread: Spread = EVEN
    bias: bool = False
    dtype: str = "bf16"
    routes: tuple[str, ...] = ("auto",)
    slots: int | None = None
    rounds: int = 11
    max_autotune: bool = True
    energy: bool = False
    energy_seconds: float = 2.0
    seed: int = 0
    device: str | None = None

    def check(self) -> None:
        """`UsageError` for what makes no sense, before any work."""
        K, N = self.hidden_size, self.intermediate_size
        if K < 64 or K % 64:
            raise UsageError(f"hidden-size must be a multiple of 64, got {K}")
        if N < 8 or N % 8 or N > MAX_COLUMNS:
            raise UsageError(f"intermediate-size must be a multiple of 8 to {MAX_COLUMNS}, got {N}")
        if bad := [count for count in self.tokens if count < 1]:
            raise UsageError(f"tokens must be >= 1, got {bad[0]}")
        for density in self.densities:
            self.spread.check(density)
        if self.dtype not in DTYPES:
            raise UsageError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        check_routes(self.routes)
        if self.slots is not None and not 1 <= self.slots <= TILE:
            raise UsageError(f"slots must be 1 to {TILE}, got {self.slots}")
        check_run(self.rounds, self.energy_seconds)


def check_run(rounds: int, energy_seconds: float) -> None:
    """`UsageError` for numbers that no run can have."""
    if rounds < 1:
        raise UsageError(f"rounds must be >= 1, got {rounds}")
    if not 0.5 <= energy_seconds <= 600:
        raise UsageError(f"energy-seconds must be 0.5 to 600, got {energy_seconds:g}")


def bench_ffn(
    settings: FfnSettings,
    note: Note = lambda text: None,
    progress: Progress = lambda done, total: None,
) -> Bench:
    """Measure each density at each token count; `note` is told what comes. Raises `TwellError`."""
    settings.check()
    device = bench_device(settings.device)
    counter = open_counter(device) if settings.energy else None
    found: dict[float, list[Point]] = {density: [] for density in settings.densities}
    with torch.no_grad():
        for tokens in settings.tokens:
            with fresh_compiler():
                dense = dense_ffns(dense_modes(device, settings.max_autotune))
                for density, points in found.items():
                    points.append(
                        _point(settings, tokens, density, dense, device, counter, note, progress)
                    )
    return Bench(
        command="bench ffn",
        facts=device_facts(device),
        settings=asdict(settings) | {"spread": as_json(settings.spread)},
        groups=tuple((_called(settings, d), tuple(points)) for d, points in found.items()),
    )


def dense_modes(device: torch.device, max_autotune: bool) -> list[str]:
    """The dense candidates of a device; on the CPU nothing is compiled."""
    if device.type != "cuda":
        return ["eager"]
    return [name for name in MODES if max_autotune or name != "max-autotune"]


def _point(
    settings: FfnSettings,
    tokens: int,
    density: float,
    dense: dict[str, DenseFfn],
    device: torch.device,
    counter: Counter | None,
    note: Note,
    progress: Progress,
) -> Point:
    dtype = DTYPES[settings.dtype]
    K, N = settings.hidden_size, settings.intermediate_size
    generator = torch.Generator(device).manual_seed(settings.seed)
    weights = make_weights(K, N, density, bias=settings.bias, dtype=dtype, generator=generator)
    x = make_rows(tokens, K, density, settings.spread, dtype=dtype, generator=generator)
    about = measure_firing(x, weights)
    slots = settings.slots or about["slots"]
    about |= {"density_asked": density, "slots": slots}
    rotated = rotated_weights(weights, device)
    about["weight_copies"] = len(rotated)

    ffns = {name: (DENSE, ffn) for name, ffn in dense.items()}
    for route in settings.routes:
        ffns[twell_name(route, device)] = (TWELL, twell_ffn(route, slots, device))
    rows = torch.randperm(tokens, generator=generator, device=device)[:REFERENCE_ROWS]
    expected = reference(x[rows], weights)

    timers: dict[str, Timer] = {}
    errors: dict[str, tuple[float, float]] = {}
    skipped: dict[str, str] = {}
    for name, (kind, ffn) in ffns.items():
        note(f"{tokens} tokens, density {density:g}: {name}")
        try:
            errors[name] = relative_errors(ffn(x, weights)[rows], expected)
            timers[name] = Timer(
                lambda i, ffn=ffn: ffn(x, rotated[i]),
                len(rotated),
                device,
                graphed=tokens < GRAPHS_BELOW,
            )
        except Exception as error:  # whatever a compiler may say
            if kind == TWELL or name == "dense eager":
                raise failed(f"{name} at {tokens} tokens", error) from error
            skipped[name] = line(error)
            note(f"{name} is left out: {skipped[name]}")
    samples = by_turns(timers, settings.rounds, progress)
    joules: dict[str, Any] = {}
    if counter is not None:
        note(f"{tokens} tokens, density {density:g}: energy")
        joules = energy_by_turns(timers, counter, settings.energy_seconds, progress)
    return Point(
        tokens=tokens,
        timed_by=timers["dense eager"].how,
        about=about,
        reference="float64",
        candidates=tuple(
            Candidate(name, ffns[name][0], tuple(taken), *errors[name], joules.get(name))
            for name, taken in samples.items()
        ),
        skipped=skipped,
    )


def measure_firing(x: Tensor, weights: FfnWeights) -> dict[str, Any]:
    """Of the gate in the dtype of `x`: density, nnz, slots, union. Refuses too small a union."""
    w_gate, _, _, b_gate, _, _ = weights.split
    count, union_count = LayerCount(len(w_gate), TILE, x.device), UnionCount()
    for rows in x.split(COUNTED_ROWS):
        gate = F.linear(rows, w_gate, b_gate)
        active = F.relu(gate)
        count.add(gate, active)
        union_count.add(active)
    layer = count.summary(0.0)
    union = union_count.summary(layer.density)
    check_union(union)
    keys = ("density", "nnz_mean", "nnz_p50", "nnz_p99", "nnz_max", "slots", "overflow")
    return {key: getattr(layer, key) for key in keys} | {"union": asdict(union)}


def rotated_weights(weights: FfnWeights, device: torch.device) -> list[FfnWeights]:
    """`weights` and as many copies as keep a gate from being in the cache when its turn comes."""
    if device.type != "cuda":
        return [weights]
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    free = torch.cuda.mem_get_info(device)[0]
    wanted = -(-CACHES * cache // weights.gate_bytes)
    affordable = free // 8 // (3 * weights.gate_bytes)
    number = max(1, min(1 + wanted, affordable, MAX_COPIES))
    return [weights, *(weights.copy() for _ in range(number - 1))]


def reference(x: Tensor, weights: FfnWeights) -> Tensor:
    """The dense equation in float64 for a few rows `[R, K]`."""
    w_gate, w_up, w_down, b_gate, b_up, b_down = (
        None if tensor is None else tensor.double() for tensor in weights.split
    )
    x = x.double()
    hidden = F.relu(F.linear(x, w_gate, b_gate)) * F.linear(x, w_up, b_up)
    return F.linear(hidden, w_down, b_down)


def relative_errors(y: Tensor, expected: Tensor) -> tuple[float, float]:
    """Of `y` `[R, K]`: over all rows, and in the worst of those that are not zero."""
    wide = expected.dtype
    if not expected.numel():
        raise TwellError("no rows to compare")
    difference, size = (y.to(wide) - expected).norm(dim=-1), expected.norm(dim=-1)
    overall = float(difference.norm() / size.norm().clamp_min(1e-300))
    by_row = difference[size > 0] / size[size > 0]
    return overall, float(by_row.max()) if len(by_row) else overall


def _called(settings: FfnSettings, density: float) -> str:
    K, N = settings.hidden_size, settings.intermediate_size
    more = settings.spread.describe()
    spread = f" ({more})" if more else ""
    return f"this FFN of {K} x {N} at {density:.2%} density{spread}"
