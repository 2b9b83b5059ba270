"""Charts: numbers to SVG that is as wide as there is room, with labels of one size.

Widths are per cent of the plot, heights pixels. A mark that has `says` is described in the line
under the chart when it is pointed at or touched (report.js).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twellctl.report.axes import Axis, number_axis
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
) -> Markup:
    """A plot of `marks` between two axes; `label` says what it shows to who cannot see it."""
    rules = [
        tag("line", x1="0", x2="100%", y1=_down(at), y2=_down(at), class_="rule")
        for at, _ in y_ticks
    ]
    plot = tag("svg", *rules, *marks, class_="plot", height=HEIGHT, role="img", aria_label=label)
    ys = [
        tag("text", text, x="100%", y=min(max(_down(at) + 4, 9), HEIGHT), text_anchor="end")
        for at, text in y_ticks
    ]
    xs = [tag("text", text, x=_across(at), y=12, text_anchor=_anchor(at)) for at, text in x_ticks]
    return tag(
        "div",
        tag("svg", *ys, class_="ys", height=HEIGHT, aria_hidden="true"),
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


def bar_chart(
    values: Sequence[float],
    spelled: Callable[[float], str],
    says: Sequence[str],
    *,
    label: str,
    x_name: str,
    names: Sequence[str] | None = None,
) -> Markup:
    """A bar a place, from 0 on."""
    axis = number_axis(values, spelled, zero=True)
    count, made = len(values), []
    gap = 0.12 if count < 120 else 0.0
    for place, value in enumerate(values):
        x, width = _across((place + gap) / count), _across((1 - 2 * gap) / count)
        top = _down(axis.at(value))
        made.append(tag("rect", x=x, width=width, y=top, height=HEIGHT - top, class_="bar"))
    made += [strip(place / count, (place + 1) / count, text) for place, text in enumerate(says)]
    return chart(made, ticks(axis), places(count, names), label=label, x_name=x_name)


def strip(start: float, end: float, says: str) -> Markup:
    """What takes the pointer from `start` to `end`, 0 to 1."""
    return tag("rect", x=_across(start), width=_across(end - start), y=0, height=HEIGHT,
               class_="touched", data_says=says)  # fmt: skip


def lines(series: Sequence[Series], x: Axis, y: Axis) -> list[Markup]:
    """A line a series, by the classes line-0, line-1 and so on."""
    made = []
    for number, one in enumerate(series):
        points = " ".join(f"{x.at(a):.5f},{1 - y.at(b):.5f}" for a, b in one.points)
        made.append(tag("polyline", points=points, class_=f"line line-{number}"))
    box = {"viewBox": "0 0 1 1", "preserveAspectRatio": "none", "width": "100%", "height": "100%"}
    return [tag("svg", *made, **box)]


def key(*entries: tuple[str, str]) -> Markup:
    """Swatches by their class, and what each stands for."""
    return tag(
        "p",
        *(tag("span", tag("i", class_=f"swatch {kind}"), f" {text}") for kind, text in entries),
        class_="key",
    )


def _across(share: float) -> str:
    return f"{100 * share:.5g}%"


def _down(share: float) -> float:
    return (1 - share) * HEIGHT


def _anchor(at: float) -> str:
    return "start" if at < 0.06 else "end" if at > 0.94 else "middle"
