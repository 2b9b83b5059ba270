"""What is fastest here, measured once and kept.

A choice of the operator belongs to the device, the sizes, the biases, the next power of two of the
number of tokens, the density in steps of 1.3 and the ways there are (twell_ways.py). It is made on
the first inputs of its kind, and lies in memory and in TWELL_CACHE_DIR/routes.json. Two are made at
once: for launches one by one, where the host's time counts, and for a CUDA graph, where it does
not. In the midst of a capture nothing is measured: a kind that is not known then goes by the rule
of the ways.

TWELL_ROUTE=dense|twell|auto decides for every model that does not say otherwise.
"""

import json
import math
import os
import statistics
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .twell_cache import alone, keep, kept
from .twell_config import ROUTES

_FILE = "routes.json"
_TIE = 1.005  # of times so near the first is taken: noise must not decide
_STEP = math.log(1.3)
_SLEEP_CLOCKS = 4_000_000  # some 2 ms, in which the host runs ahead
# untimed runs before a median, as many as take so long, and at most so many: dense products at full
# power lower the clocks, but only after a while
_WARM_MS, _WARM_RUNS = 60.0, 16

_choices: dict["Kind", "Choice"] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class Kind:
    """What one choice is made for. `density` is a bucket, None where no profile told it."""

    device: str
    K: int
    N: int
    biases: bool
    tokens: int
    density: int | None
    slots: int
    kernels: str  # whose they are, Hopper's or any GPU's, and their sources
    ways: tuple[str, ...]  # there are, the first before others that are as fast

    @property
    def key(self) -> str:
        """How the kind is called in routes.json."""
        bias = "bias" if self.biases else "plain"
        return (
            f"{self.device} K={self.K} N={self.N} {bias} M<={self.tokens} "
            f"density={self.density} slots={self.slots} {self.kernels} of {','.join(self.ways)}"
        )


@dataclass(frozen=True)
class Choice:
    """The fastest way: launched one by one, and inside a CUDA graph."""

    eager: str
    graph: str


def requested(route: str) -> str:
    """`route` of the model if it says one, else that of TWELL_ROUTE, else "auto"."""
    if route != "auto":
        return check_route(route)
    return check_route(os.environ.get("TWELL_ROUTE") or "auto", "TWELL_ROUTE")


def check_route(route: str, name: str = "route") -> str:
    """`route` itself; `ValueError` with its `name` if there is no such route."""
    if route not in ROUTES:
        raise ValueError(f"{name} must be one of {', '.join(ROUTES)}, got {route!r}")
    return route


def token_bucket(M: int) -> int:
    """The next power of two."""
    return 1 << (M - 1).bit_length()


def density_bucket(density: float) -> int:
    """Steps of 1.3 below 1; what fires less than once in 10000 counts as that."""
    return round(math.log(max(density, 1e-4)) / _STEP)


def choose(
    kind: Kind,
    capturing: bool,
    runs: Mapping[str, Callable[[], object]],
    by_rule: Callable[[], str],
    count_density: Callable[[], float],
) -> str:
    """The name of the fastest of `runs`, which compute one FFN on the inputs at hand.

    `by_rule` says what is taken unmeasured. `count_density` is asked where no profile told the
    density.
    """
    if len(runs) == 1:
        return next(iter(runs))
    found = _choices.get(kind)
    if found is None:
        if capturing:
            return by_rule()
        with _lock:
            found = _choices.get(kind) or _kept_or_measured(kind, runs, count_density)
            _choices[kind] = found
    return found.graph if capturing else found.eager


def known_choices() -> dict[Kind, Choice]:
    """What was chosen in this process so far."""
    with _lock:
        return dict(_choices)


def _kept_or_measured(
    kind: Kind, runs: Mapping[str, Callable[[], object]], count_density: Callable[[], float]
) -> Choice:
    key = kind.key
    if kind.density is None:
        key += f" counted={density_bucket(count_density())}"
    return Choice(**kept_or_measured(key, list(runs), ("eager", "graph"), lambda: measure(runs)))


def kept_or_measured(
    key: str, names: list[str], modes: tuple[str, ...], measure: Callable[[], dict[str, float]]
) -> dict[str, str]:
    """{mode: the fastest of `names`}, as routes.json has it under `key`, else as measured and kept.

    `measure` returns milliseconds by "mode name"; infinite is what does not fit into memory.
    """
    entry = _read_kept().get(key)
    found: dict[str, Any] = {}
    if isinstance(entry, dict):
        found = {mode: entry.get(mode) for mode in modes}
    if found and all(name in names for name in found.values()):  # what is kept may be anything
        return found
    times = measure()
    best = {mode: fastest({name: times[f"{mode} {name}"] for name in names}) for mode in modes}
    if math.inf not in times.values():  # there may be more memory another time
        with alone():
            content = json.dumps(_read_kept() | {key: best | {"ms": times}}, indent=1) + "\n"
            keep(_FILE, content.encode())
    return best


def fastest(times: Mapping[str, float]) -> str:
    """The first name whose time is the shortest, or as good as that."""
    return next(name for name, time in times.items() if time <= _TIE * min(times.values()))


def measure(runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds of each of `runs` on the current CUDA stream, by mode and name.

    What does not fit into memory takes for ever; the error is raised if that goes for all of them.
    """
    times, error = {}, None
    for mode, ahead in (("eager", False), ("graph", True)):
        for name, run in runs.items():
            try:
                times[f"{mode} {name}"] = round(median_ms(run, ahead=ahead), 5)
            except torch.OutOfMemoryError as too_large:
                times[f"{mode} {name}"] = math.inf
                error = too_large.with_traceback(None)  # which would hold tensors
    if error is not None and all(time == math.inf for time in times.values()):
        raise error
    return times


def median_ms(run: Callable[[], object], *, ahead: bool) -> float:
    """Median time of five runs, after untimed ones that let the clocks settle."""
    timed_ms(run, ahead=ahead)  # which may load kernels
    one = timed_ms(run, ahead=ahead)
    for _ in range(min(_WARM_RUNS, int(_WARM_MS / max(one, 1e-3)))):
        run()
    return statistics.median([timed_ms(run, ahead=ahead) for _ in range(5)])


def timed_ms(run: Callable[[], object], *, ahead: bool) -> float:
    """Milliseconds of one run; `ahead`: with all launches queued before the clock starts."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if ahead:
        torch.cuda._sleep(_SLEEP_CLOCKS)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _read_kept() -> dict:
    try:
        found = json.loads(kept(_FILE) or b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
