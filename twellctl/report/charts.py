"""Charts: numbers to SVG that is as wide as there is room, with labels of one size.

Widths are per cent of the plot, heights pixels. A mark that has `says` is described in the line
under the chart when it is pointed at or touched (report.js).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from twellctl.report.axes import Axis
from twellctl.report.markup import Markup, tag

HEIGHT = 180
ROOM = 44  # characters under the narrowest plot
LONGEST = 12  # of a name there; the line under the chart and the table have all of it

Tick = tuple[float, str]  # where, 0 to 1, and what is written there


@dataclass(frozen=True)
class Series:
    """A line: its name and its points (x, y), in the order of x."""

    name: str
    points: tuple[tuple[float, float], ...]


def chart(
    marks: Sequence[Markup],
    y_ticks: Sequence[Tick],
    x_ticks: Sequence[Tick],
    *,
    label: str,
    x_name: str,
    height: int = HEIGHT,
    ruled: bool = True,
) -> Markup:
    """A plot of `marks` between two axes; `label` says what it shows to who cannot see it."""
    rules = [
        tag("line", x1="0", x2="100%", y1=_down(at, height), y2=_down(at, height), class_="rule")
        for at, _ in y_ticks
    ]
    plot = tag("svg", *(rules if ruled else ()), *marks, class_="plot", height=height, role="img",
               aria_label=label)  # fmt: skip
    ys = [
        tag("text", text, x="100%", y=min(max(_down(at, height) + 4, 9), height), text_anchor="end")
        for at, text in y_ticks
    ]
    xs = [tag("text", text, x=_across(at), y=12, text_anchor=_anchor(at)) for at, text in x_ticks]
    return tag(
        "div",
        tag("svg", *ys, class_="ys", height=height, aria_hidden="true"),
        plot,
        tag("svg", *xs, class_="xs", height=16, aria_hidden="true"),
        tag("p", x_name, class_="x-name"),
        tag("p", class_="says", aria_live="polite"),
        class_="chart",
    )


def ticks(axis: Axis) -> list[Tick]:
    """What is written beside an axis."""
    return [(axis.at(value), axis.spelled(value)) for value in axis.ticks]


def places(count: int, names: Sequence[str] | None = None) -> list[Tick]:
    """Names, or numbers from 0, of `count` equal places of an axis: so many as have room."""
    names = [str(number) for number in range(count)] if names is None else [*map(_short, names)]
    room = max(1, ROOM // (2 + max(map(len, names))))
    return [((place + 0.5) / count, names[place]) for place in range(0, count, -(-count // room))]


def _short(name: str) -> str:
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"


def bars(values: Sequence[float], axis: Axis, says: Sequence[str]) -> list[Markup]:
    """A bar a place, from the low end of the axis on."""
    made = []
    for place, value in enumerate(values):
        top = _down(axis.at(value), HEIGHT)
        made.append(_in_place("rect", place, len(values), y=top, height=HEIGHT - top, class_="bar"))
    return made + touched(says)


def ranges(
    spans: Sequence[tuple[float, float]],
    middles: Sequence[float],
    ends: Sequence[float],
    axis: Axis,
    says: Sequence[str],
) -> list[Markup]:
    """A place: a box from the first to the second of its span, a tick within it, a line above."""
    made, count = [], len(spans)
    for place, ((low, high), middle, end) in enumerate(zip(spans, middles, ends, strict=True)):
        bottom, top = _down(axis.at(low), HEIGHT), _down(axis.at(high), HEIGHT)
        centre = _across((place + 0.5) / count)
        made += [
            tag("line", x1=centre, x2=centre, y1=_down(axis.at(end), HEIGHT), y2=top, class_="end"),
            _in_place("rect", place, count, y=top, height=max(1.0, bottom - top), class_="box"),
            _in_place("rect", place, count, y=_down(axis.at(middle), HEIGHT) - 1, height=2,
                      class_="middle"),
        ]  # fmt: skip
    return made + touched(says)


def touched(says: Sequence[str]) -> list[Markup]:
    """What takes the pointer: the whole height of each place."""
    count = len(says)
    return [strip(place / count, (place + 1) / count, text) for place, text in enumerate(says)]


def strip(start: float, end: float, says: str) -> Markup:
    """What takes the pointer from `start` to `end`, 0 to 1."""
    return tag("rect", x=_across(start), width=_across(end - start), y=0, height=HEIGHT,
               class_="touched", data_says=says)  # fmt: skip


def mark(at: float) -> Markup:
    """A line across the plot at that height, 0 to 1."""
    y = _down(at, HEIGHT)
    return tag("line", x1="0", x2="100%", y1=y, y2=y, class_="mark")


def dots(
    points: Sequence[tuple[float, float]], x: Axis, y: Axis, says: Sequence[str]
) -> list[Markup]:
    """A dot a point."""
    return [
        tag("circle", cx=_across(x.at(a)), cy=_down(y.at(b), HEIGHT), r=5, class_="dot",
            data_says=text)
        for (a, b), text in zip(points, says, strict=True)
    ]  # fmt: skip


def lines(series: Sequence[Series], x: Axis, y: Axis) -> list[Markup]:
    """A line a series, by the classes line-0, line-1 and so on."""
    made = []
    for number, one in enumerate(series):
        points = " ".join(f"{x.at(a):.5f},{1 - y.at(b):.5f}" for a, b in one.points)
        made.append(tag("polyline", points=points, class_=f"line line-{number}"))
    box = {"viewBox": "0 0 1 1", "preserveAspectRatio": "none", "width": "100%", "height": "100%"}
    return [tag("svg", *made, **box)]


def level(
    value: float, number: int, height: float, start: float, width: float, says: str
) -> Markup:
    """A cell of a heat map: row `number`, so high; `start`, `width` and `value` are 0 to 1."""
    return tag("rect", x=_across(start), width=_across(width), y=number * height, height=height,
               fill_opacity=round(value, 3), class_="heat", data_says=says)  # fmt: skip


def row_height(count: int) -> int:
    """Of a heat map with so many rows, in pixels."""
    return max(5, min(18, 420 // count))


def row_ticks(count: int, names: Sequence[str] | None = None) -> list[Tick]:
    """The places of rows, the first of which is on top."""
    return [(1 - at, text) for at, text in places(count, names)]


def key(*entries: tuple[str, str]) -> Markup:
    """Swatches by their class, and what each stands for."""
    return tag(
        "p",
        *(tag("span", tag("i", class_=f"swatch {kind}"), f" {text}") for kind, text in entries),
        class_="key",
    )


def _in_place(name: str, place: int, count: int, **more: object) -> Markup:
    """An element that takes most of the width of a place."""
    gap = 0.12 if count < 120 else 0.0
    x, width = (place + gap) / count, (1 - 2 * gap) / count
    return tag(name, x=_across(x), width=_across(width), **more)


def _across(share: float) -> str:
    return f"{100 * share:.5g}%"


def _down(share: float, height: float) -> float:
    return (1 - share) * height


def _anchor(at: float) -> str:
    return "start" if at < 0.06 else "end" if at > 0.94 else "middle"
