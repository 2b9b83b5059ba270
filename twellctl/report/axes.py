"""Axes: where a value lies between two ends, and which values are written beside."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

LEAST_SHARE = 1e-4
SLACK = 0.01  # of a step: a value that lies so little outside the ends is drawn at the end


def percent(share: float) -> str:
    """With three digits: "12.3 %", "0.456 %"."""
    value = 100 * share
    if value == 0:
        return "0 %"
    digits = 1 if value >= 10 else 2 if value >= 1 else 3 if value >= 0.01 else 4
    return f"{value:.{digits}f} %"


def short_percent(share: float) -> str:
    """Without zeros at the end: "10 %", "0.1 %"."""
    return f"{100 * share:g} %"


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`, linear or logarithmic; `spelled` writes a value."""

    low: float
    high: float
    ticks: tuple[float, ...]
    spelled: Callable[[float], str]
    log: bool = False

    def at(self, value: float) -> float:
        """Where `value` lies, from 0 to 1; what lies outside is at an end."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        return min(1.0, max(0.0, (value - low) / (high - low)))


def share_axis(shares: Iterable[float]) -> Axis:
    """Logarithmic, of whole decades, for shares; 0 lies at the low end."""
    some = [share for share in shares if share > 0] or [1.0]
    low = 10 ** math.floor(math.log10(max(min(some), LEAST_SHARE)) + 1e-9)
    high = 10 ** math.ceil(math.log10(min(1.0, max(*some, LEAST_SHARE))) - 1e-9)
    low = min(low, high / 10)
    decades = round(math.log10(high / low))
    ticks = tuple(low * 10**decade for decade in range(decades + 1))
    return Axis(low, high, ticks, short_percent, log=True)


def number_axis(
    values: Iterable[float], spelled: Callable[[float], str] = "{:g}".format, *, zero: bool = False
) -> Axis:
    """Linear, about the `values`, from round numbers to round numbers; with `zero` from 0 on."""
    some = list(values) or [0.0]
    low, high = min([*some, 0.0] if zero else some), max([*some, 0.0] if zero else some)
    if low == high:
        low, high = (low, low + 1) if zero else (low - 0.5, high + 0.5)
    step = _round_step((high - low) / 4)
    first, last = math.floor(low / step + SLACK), math.ceil(high / step - SLACK)
    ticks = tuple(float(f"{number * step:.9g}") for number in range(first, last + 1))
    return Axis(ticks[0], ticks[-1], ticks, spelled)


def _round_step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is at least so much."""
    power = 10 ** math.floor(math.log10(least))
    return next(f * power for f in (1, 2, 5, 10) if f * power >= least * (1 - 1e-9))
