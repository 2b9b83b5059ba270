"""Dense, fused or TwELL: what is fastest here, measured once and kept.

A choice belongs to the device, the sizes, the biases, the next power of two of the number of tokens
and the density in steps of 1.3. It is made on the first inputs of its kind, and lies in memory and
in TWELL_CACHE_DIR/routes.json. Two are made at once: for launches one by one, where the host's time
counts, and for a CUDA graph, where it does not. In the midst of a capture nothing is measured: a
kind that is not known then goes by its density and its tokens.

TWELL_ROUTE=dense|fused|twell|portable|auto decides for every model that does not say otherwise.
"""

import json
import math
import os
import statistics
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from .twell_cache import cache_dir, keep

ROUTES = ("auto", "twell", "portable", "fused", "dense")
# what was not measured is taken sparsely below this density, above this number of tokens
DENSE_FROM, SPARSE_ABOVE = 0.02, 2048
# the same of few tokens, for which there are kernels of their own: up to this number
FEW_DENSE_FROM, FEW_SPARSE_UPTO = 0.1, 16
_STEP = math.log(1.3)
_SLEEP_CLOCKS = 4_000_000  # some 2 ms, in which the host runs ahead

_choices: dict["Kind", "Choice"] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class Kind:
    """What one choice is made for. `density` is a bucket, None where no profile told it.

    `few`: "twell" takes the kernels for few tokens (twell_few.py), which follows from the rest.
    """

    device: str
    K: int
    N: int
    biases: bool
    tokens: int
    density: int | None
    slots: int
    kernels: str  # whose they are, Hopper's or the portable ones, and their sources
    few: bool = False

    @property
    def key(self) -> str:
        """How the kind is called in routes.json."""
        bias = "bias" if self.biases else "plain"
        return (
            f"{self.device} K={self.K} N={self.N} {bias} M<={self.tokens} "
            f"density={self.density} slots={self.slots} {self.kernels}"
        )


@dataclass(frozen=True)
class Choice:
    """The faster route: launched one by one, and inside a CUDA graph."""

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


def unmeasured(density: float | None, tokens: int, few: bool) -> str:
    """The route of what was not measured: as it was found on an H200."""
    few = few and tokens <= FEW_SPARSE_UPTO
    if not few and tokens <= SPARSE_ABOVE:
        return "dense"
    dense_from = FEW_DENSE_FROM if few else DENSE_FROM
    return "dense" if density is not None and density >= dense_from else "twell"


def choose(
    kind: Kind,
    density: float | None,
    capturing: bool,
    runs: Mapping[str, Callable[[], object]],
    count_density: Callable[[], float],
) -> str:
    """The name of the fastest of `runs`, which compute one FFN on the inputs at hand.

    `count_density` is asked where no profile told the density.
    """
    found = _choices.get(kind)
    if found is None:
        if capturing:
            return unmeasured(density, kind.tokens, kind.few)
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
    choice = _parse(_read_kept().get(key), runs)
    if choice is None:
        choice, times = measure(runs)
        if math.inf in times.values():  # there may be more memory another time
            return choice
        kept = {"eager": choice.eager, "graph": choice.graph, "ms": times}
        content = json.dumps(_read_kept() | {key: kept}, indent=1) + "\n"
        keep(cache_dir() / "routes.json", content.encode())
    return choice


def measure(runs: Mapping[str, Callable[[], object]]) -> tuple[Choice, dict[str, float]]:
    """Time each of `runs` on the current CUDA stream: the choice, and milliseconds by name.

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
    best = [min(runs, key=lambda name, m=mode: times[f"{m} {name}"]) for mode in ("eager", "graph")]
    return Choice(*best), times


def median_ms(run: Callable[[], object], *, ahead: bool) -> float:
    """Median time of five runs; `ahead`: with all launches queued before the clock starts."""
    for _ in range(2):
        run()
    found = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        if ahead:
            torch.cuda._sleep(_SLEEP_CLOCKS)
        start.record()
        run()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return statistics.median(found)


def _read_kept() -> dict:
    try:
        kept = json.loads((cache_dir() / "routes.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _parse(kept: object, runs: Collection[str]) -> Choice | None:
    if not isinstance(kept, dict):
        return None
    choice = Choice(kept.get("eager"), kept.get("graph"))
    names = list(runs)  # what is kept may be anything, a list too
    return choice if choice.eager in names and choice.graph in names else None
