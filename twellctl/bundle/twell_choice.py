"""Which way each number of tokens goes: a plan, measured once when a model is opened, and kept.

A plan is a value. It is read at each call by one look-up, printed as it is, and lies in plans.json
of the cache folder under what it was measured for.
"""

import functools
import json
import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from .twell_cache import PLANS, alone, keep, kept_json

_TIE = 1.005  # of times so near the first is taken: noise must not decide
_STEP = math.log(1.3)
_SLEEP_CLOCKS = 4_000_000  # some 2 ms, in which the host runs ahead
# Turns that are not timed: two at least, and as many as take so long, up to a limit. Dense products
# at full power lower the clocks, but only after a while.
_WARM_MS, _LEAST_WARM, _MOST_WARM, _TURNS = 60.0, 2, 16, 7


@dataclass(frozen=True)
class WayPlan:
    """The way of each number of tokens. `names[i]` serves up to `ends[i]` tokens, the last all
    above.

    As text "1-4 pairs, 5-64 union, 65+ dense", which `parse` reads.
    """

    ends: tuple[int, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, tops: Iterable[int], name: Callable[[int], str]) -> "WayPlan":
        """By the `name` of each of `tops`, ascending; it serves the numbers since the one before,
        the last one all above, too."""
        ends: list[int] = []
        names: list[str] = []
        for top in tops:
            if names and names[-1] == name(top):
                ends.pop()
            else:
                names.append(name(top))
            ends.append(top)
        return cls(tuple(ends[:-1]), tuple(names))

    @classmethod
    @functools.cache
    def parse(cls, text: str) -> "WayPlan":
        """`ValueError` if `text` is no plan."""
        ends: list[int] = []
        names: list[str] = []
        for part in text.split(", "):
            tokens, _, name = part.partition(" ")
            *_, last = tokens.removesuffix("+").split("-")
            names.append(name)
            if not tokens.endswith("+") and last.isdecimal():
                ends.append(int(last))
        made = cls(tuple(ends), tuple(names))
        if len(names) != len(ends) + 1 or str(made) != text:
            raise ValueError(f"a plan is written like '1-4 union, 5+ dense', got {text!r}")
        return made

    def name(self, tokens: int) -> str:
        """The way that so many tokens go."""
        return self.names[bisect_left(self.ends, tokens)]

    def __str__(self) -> str:
        firsts = (1, *(end + 1 for end in self.ends))
        ranges = [f"{a}-{b}" if a < b else f"{a}" for a, b in zip(firsts, self.ends, strict=False)]
        ranges.append(f"{firsts[-1]}+")
        return ", ".join(map(" ".join, zip(ranges, self.names, strict=True)))


def density_bucket(density: float) -> int:
    """Steps of 1.3 below 1; what fires less than once in 10000 counts as that."""
    return round(math.log(max(density, 1e-4)) / _STEP)


def measured_plan(
    key: str, ways: Mapping[int, Sequence[str]], measure: Callable[[int], Mapping[str, float]]
) -> WayPlan:
    """By the fastest of `ways` for each number of tokens, as kept under `key`, else as measured.

    `ways`: their names by numbers of tokens, ascending. `measure(tokens)`: milliseconds by name,
    infinite of what does not fit into memory; it is asked only where there are several ways.
    """
    key += " of " + "; ".join(f"{top} {', '.join(names)}" for top, names in ways.items())
    if (plan := _kept_plan(key, ways)) is not None:
        return plan
    times = {top: measure(top) for top, names in ways.items() if len(names) > 1}
    plan = WayPlan.of(ways, lambda top: fastest(times[top]) if top in times else ways[top][0])
    if not any(math.inf in found.values() for found in times.values()):
        # else there may be more memory another time
        with alone():
            entry = {"plan": str(plan), "ms": {str(top): found for top, found in times.items()}}
            keep(PLANS, (json.dumps(kept_json(PLANS) | {key: entry}, indent=1) + "\n").encode())
    return plan


def fastest(times: Mapping[str, float]) -> str:
    """The first name whose time is the shortest, or as good as that."""
    return next(name for name, time in times.items() if time <= _TIE * min(times.values()))


def measure_by_turns(
    runs: Mapping[str, Callable[[], object]],
    prepared: Callable[[Callable[[], object]], Callable[[], object]] = lambda run: run,
) -> dict[str, float]:
    """Milliseconds of each of `runs` on the current CUDA stream: medians, taken by turns.

    All launches of a run are queued before its clock starts, so the host's time does not count.
    `prepared` makes of each run what is timed. What does not fit into memory takes for ever; the
    error is raised if that goes for all of them.
    """
    ready, error = {}, None
    for name, run in runs.items():
        try:
            ready[name] = prepared(run)
            ready[name]()  # which may load kernels
        except torch.OutOfMemoryError as too_large:
            ready.pop(name, None)
            error = too_large.with_traceback(None)  # which would hold tensors
    if error is not None and not ready:
        raise error
    spent, warm = 0.0, 0
    while warm < _LEAST_WARM or (spent < _WARM_MS and warm < _MOST_WARM):
        spent += sum(map(gpu_ms, ready.values()))
        warm += 1
    turns = [{name: gpu_ms(run) for name, run in ready.items()} for _ in range(_TURNS)]
    found = {name: [turn[name] for turn in turns] for name in ready}
    return {name: round(statistics.median(found.get(name, [math.inf])), 5) for name in runs}


def gpu_ms(run: Callable[[], object]) -> float:
    """Milliseconds of one run on the GPU, with all launches queued before the clock starts."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(_SLEEP_CLOCKS)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _kept_plan(key: str, ways: Mapping[int, Sequence[str]]) -> WayPlan | None:
    """None if nothing is kept under `key` that makes sense."""
    entry = kept_json(PLANS).get(key)
    text = entry.get("plan") if isinstance(entry, dict) else None
    try:
        plan = WayPlan.parse(text if isinstance(text, str) else "")
    except ValueError:
        return None
    return plan if all(plan.name(top) in names for top, names in ways.items()) else None
