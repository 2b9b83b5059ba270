"""What a plot shows of a result, as plain data: `to_chart` of a result makes it, plots.py draws it.

Shares are shares, 0.15 for 15 %; a value that there is not is None.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from twellctl.models.shards import ORIGINAL

Values: TypeAlias = Sequence[float | None]


def short_name(model: str) -> str:
    """The last part of a path or a hub id; of an original in a model's folder also the folder."""
    *_, before, last = ["", *model.rstrip("/").split("/")]
    return f"{before}/{last}" if before and last == ORIGINAL else last


@dataclass(frozen=True)
class Line:
    """A value for each x of its panel, or None; between `low` and `high`, if given, is a band."""

    name: str
    y: Values
    low: Values = ()
    high: Values = ()


@dataclass(frozen=True)
class Panel:
    """Lines over the same `x`, numbers in order or names; `title` says what is drawn.

    `wanted`: the value that was asked for. With `steps`, a value lasts until the next x. The axis
    begins at 0 where it is `from_zero`.
    """

    title: str
    x_label: str
    x: Sequence[float | str]
    lines: Sequence[Line]
    are_shares: bool = True
    wanted: float | None = None
    steps: bool = False
    from_zero: bool = True


@dataclass(frozen=True)
class Curves:
    """Panels below each other; `note`: how it was measured."""

    title: str
    panels: Sequence[Panel]
    note: str = ""


@dataclass(frozen=True)
class Bars:
    """A bar for each group of a panel, and what it cannot exceed (`limits`)."""

    name: str
    heights: Values
    limits: Values


@dataclass(frozen=True)
class BarPanel:
    """Bars side by side in each of the `groups`."""

    title: str
    groups: Sequence[str]
    bars: Sequence[Bars]


@dataclass(frozen=True)
class BarChart:
    """Panels below each other, of the same names; `limit` says what the limits are."""

    title: str
    x_label: str
    y_label: str
    limit: str
    panels: Sequence[BarPanel]
    note: str = ""


@dataclass(frozen=True)
class Point:
    """What a model keeps of its original's tasks, and reads for a token of its original's bytes.

    Both are shares, `stderr` the standard error of `kept`; `original` names the model that it was
    made from, `series` what it has in common with other points.
    """

    label: str
    bytes_read: float
    kept: float
    stderr: float
    original: str
    series: str = ""


@dataclass(frozen=True)
class Points:
    """A panel for each original, which is itself a point of it: all kept, all bytes read."""

    title: str
    points: Sequence[Point]
    note: str = ""


Chart: TypeAlias = Curves | BarChart | Points
