"""Charts drawn by matplotlib: curves, bars, points. What they show is in charts.py."""

import itertools
import math
from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from twellctl.errors import bounded, printable
from twellctl.report.charts import BarChart, BarPanel, Chart, Curves, Panel, Point, Points, Values
from twellctl.report.label_places import place_labels
from twellctl.report.plot_style import FAINT, GROUND, INK, SERIES, WIDTH, styled

PANEL, POINTS_PANEL, AROUND = 1.9, 3.6, 0.9  # inches of height: of a panel, around all
LONGEST = 60  # characters of a name
# three and five for four colours: twelve lines differ, and twenty series of points
DASHES, MARKERS = ("-", (0, (5, 1.5)), (0, (1.5, 1.5))), "osD^v"
SHARE_TICKS = (0.0625, 0.125, 0.25, 0.5, 1.0)
HOLDS = 0.16  # of the axis: a bar of this height holds its number
FEW = 8  # values: each has its marker
LEGEND = 92  # characters of a line of names, each with a mark of six


def draw(chart: Chart) -> Figure:
    """`chart` as a figure, which `content_of` makes a file of."""
    with styled():
        if isinstance(chart, Curves):
            return _curves(chart)
        return _bar_chart(chart) if isinstance(chart, BarChart) else _points(chart)


def _figure(title: str, note: str, num_panels: int, height: float) -> tuple[Figure, list[Axes]]:
    """An empty figure of panels below each other."""
    figure = Figure((WIDTH, AROUND + num_panels * height), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.07)
    figure.suptitle(_name(title), x=0.012, ha="left")
    if note:
        figure.supxlabel(printable(note), x=0.012, ha="left", fontsize=8.5, color=FAINT)
    panels = figure.subplots(num_panels, 1, squeeze=False)[:, 0].tolist()
    for axes in panels:
        axes.margins(x=0.02)
    return figure, panels


def _name(text: str) -> str:
    return bounded(printable(text), LONGEST)


def _percent(axis: Axis) -> None:
    axis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.6g}%"))


def _legend(axes: Axes, handles: Sequence[Artist], names: Sequence[str]) -> None:
    """Between a panel and its title, which moves up."""
    longest, in_a_row = max(map(len, names)) + 6, sum(len(name) + 6 for name in names)
    columns = len(names) if in_a_row <= LEGEND else max(1, LEGEND // longest)
    rows = math.ceil(len(names) / columns)
    legend = axes.legend(
        handles,
        ["-"] * len(handles),
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        ncols=columns,
        borderaxespad=0,
        borderpad=0.3,
        columnspacing=1.6,
        handlelength=1.8,
        handletextpad=0.6,
    )
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_text(name)  # now: a name that begins with _ would have been left out
    axes.set_title(axes.get_title("left"), pad=8 + 15 * rows)


# ---- curves ----


def _curves(chart: Curves) -> Figure:
    figure, panels = _figure(chart.title, chart.note, len(chart.panels), PANEL)
    for axes, panel in zip(panels, chart.panels, strict=True):
        _panel(axes, panel)
    return figure


def _panel(axes: Axes, panel: Panel) -> None:
    axes.set_title(_name(panel.title))
    axes.set_xlabel(_name(panel.x_label))
    places: list[float] = [i if isinstance(x, str) else x for i, x in enumerate(panel.x)]
    is_named = any(isinstance(x, str) for x in panel.x)
    handles = []
    styles = zip(itertools.cycle(SERIES), itertools.cycle(DASHES))
    for line, (colour, dashes) in zip(panel.lines, styles, strict=False):
        known = [(x, y) for x, y in zip(places, line.y, strict=True) if y is not None]
        (handle,) = axes.plot(
            *(zip(*known, strict=True) if known else ([], [])),
            color=colour,
            linestyle=dashes,
            marker="o" if is_named or len(known) < FEW else "",
            drawstyle="steps-post" if panel.steps else "default",
        )
        handles.append(handle)
        if line.low:
            band = axes.fill_between(places, _numbers(line.low), _numbers(line.high))
            band.set(facecolor=colour, alpha=0.18, linewidth=0)
    names = [line.name for line in panel.lines]
    if panel.wanted is not None:
        handles.append(
            axes.axhline(panel.wanted, color=FAINT, linestyle=(0, (2, 2)), linewidth=1.2)
        )
        names.append("asked for")
    if len(names) > 1:
        _legend(axes, handles, list(map(_name, names)))
    if panel.from_zero:
        axes.set_ylim(0, 1.06 * max(axes.dataLim.y1, panel.wanted or 0) or 1)
    if len(places) > 1:  # also of lines that begin later
        room = 0.02 * (places[-1] - places[0])
        axes.set_xlim(places[0] - room, places[-1] + room)
    if panel.are_shares:
        _percent(axes.yaxis)
    if is_named:
        axes.set_xticks(places, [_name(str(x)) for x in panel.x])
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _numbers(values: Values) -> list[float]:
    """matplotlib draws nothing at NaN."""
    return [float("nan") if value is None else value for value in values]


# ---- bars ----


def _bar_chart(chart: BarChart) -> Figure:
    figure, panels = _figure(chart.title, chart.note, len(chart.panels), PANEL)
    names = list(dict.fromkeys(bars.name for panel in chart.panels for bars in panel.bars))
    colours = dict(zip(names, itertools.cycle(SERIES), strict=False))
    bars = [bars for panel in chart.panels for bars in panel.bars]
    shown = [value for one in bars for value in (*one.heights, *one.limits) if value]
    top = 1.08 * max(shown, default=1)
    for axes, panel in zip(panels, chart.panels, strict=True):
        axes.set_title(_name(panel.title))
        axes.set_ylabel(_name(chart.y_label))
        axes.set_ylim(0, top)
        axes.set_xticks(range(len(panel.groups)), list(map(_name, panel.groups)))
        axes.tick_params(axis="x", length=0)
        _bars(axes, panel, colours)
    panels[-1].set_xlabel(_name(chart.x_label))
    handles: list[Artist] = [Patch(color=colour) for colour in colours.values()]
    handles.append(Line2D([], [], color=INK, linewidth=1.6))
    _legend(panels[0], handles, [*map(_name, names), _name(chart.limit)])
    return figure


def _bars(axes: Axes, panel: BarPanel, colours: dict[str, str]) -> None:
    width = 0.8 / len(panel.bars)
    for number, bars in enumerate(panel.bars):
        places = [group + (number + 0.5) * width - 0.4 for group in range(len(panel.groups))]
        made = axes.bar(places, _numbers(bars.heights), 0.9 * width, color=colours[bars.name])
        made.set_label(bars.name)
        for place, height, limit in zip(places, bars.heights, bars.limits, strict=True):
            if limit is not None:
                ends = place - 0.45 * width, place + 0.45 * width
                axes.hlines(limit, *ends, color=INK, linewidth=1.6)
            if height is not None:
                _number(axes, place, height, limit)


def _number(axes: Axes, place: float, height: float, limit: float | None) -> None:
    """The height of a bar in figures: at its foot, or above one that is too low for that."""
    room = HOLDS * axes.get_ylim()[1]
    above = height if limit is None or limit - height > room else max(height, limit)
    axes.annotate(
        f"{height:.3g}" if height < 100 else f"{height:.0f}",
        (place, 0 if height > room else above),
        (0, 4),
        textcoords="offset points",
        ha="center",
        color=GROUND if height > room else INK,
    )


# ---- points ----


def _points(chart: Points) -> Figure:
    originals = list(dict.fromkeys(point.original for point in chart.points))
    series = list(dict.fromkeys(point.series for point in chart.points))
    looks = zip(itertools.cycle(SERIES), itertools.cycle(MARKERS))
    styles = dict(zip(series, looks, strict=False))
    figure, panels = _figure(chart.title, chart.note, len(originals), POINTS_PANEL)
    groups = [[point for point in chart.points if point.original == one] for one in originals]
    for axes, original, points in zip(panels, originals, groups, strict=True):
        axes.set_title(_name(original))
        _point_axes(axes, chart.points)
        for point in points:
            _mark(axes, point, *styles[point.series])
    panels[-1].set_xlabel("bytes of linear layers that a token reads, of the original's (log)")
    if len(series) > 1:
        marks = [Line2D([], [], color=c, marker=m, linestyle="") for c, m in styles.values()]
        _legend(panels[0], marks, list(map(_name, series)))
    figure.draw_without_rendering()  # now it is known where everything lies
    for axes, points in zip(panels, groups, strict=True):
        places = [(point.bytes_read, point.kept) for point in points]
        names = [_name(point.label) for point in points]
        bars = [point.stderr for point in points]
        place_labels(axes, [(1, 1), *places], [0, *bars], ["the original", *names])
    return figure


def _point_axes(axes: Axes, points: Sequence[Point]) -> None:
    """Axes on which all `points` lie, and the original."""
    least = min(0.5, *(point.bytes_read for point in points))
    most = max(1, *(point.bytes_read for point in points))
    lowest = min(0.9, *(point.kept - point.stderr for point in points))
    highest = max(1.02, *(point.kept + point.stderr for point in points))
    axes.set_xscale("log")
    axes.set_xlim(least / 1.2, most * 1.2)
    axes.set_ylim(lowest - 0.03, highest + 0.03)
    axes.xaxis.set_major_locator(FixedLocator(SHARE_TICKS))
    axes.xaxis.set_minor_locator(NullLocator())
    _percent(axes.xaxis)
    _percent(axes.yaxis)
    axes.set_ylabel("tasks kept")
    axes.axhline(1, color=FAINT, linewidth=1.2, linestyle=(0, (2, 2)), zorder=1)
    axes.plot([1], [1], "o", markersize=8, markerfacecolor=GROUND, color=INK)


def _mark(axes: Axes, point: Point, colour: str, marker: str) -> None:
    """A point with its standard error."""
    axes.errorbar(
        [point.bytes_read],
        [point.kept],
        yerr=[point.stderr],
        fmt=marker,
        color=colour,
        markersize=7,
        elinewidth=1.2,
        markeredgecolor=GROUND,
        label=point.label,
    )
