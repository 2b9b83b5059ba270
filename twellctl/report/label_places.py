"""Where the names of points go in a plot: beside each, over no other point, error bar or name."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

from twellctl.report.plot_style import FAINT, GROUND

MARK, GAP = 4.5, 7.0  # points of type: from the middle of a marker to its edge, and to its name
SIZE = 9  # of the type
FAR = (1.0, 1.9, 3.0, 4.5, 6.0)  # gaps from a point to its name, nearest first
LED = 1.9  # from which on a line leads there
AROUND = (  # which way from the point: what is tried first is liked best
    (1, 0),
    (-1, 0),
    (0, 1),
    (0, -1),
    (0.8, 0.8),
    (0.8, -0.8),
    (-0.8, 0.8),
    (-0.8, -0.8),
)
BEHIND = 1.5  # above the grid, below marks
# what a pixel costs over something else, or outside of the panel; a place further costs 1
OVER, OUTSIDE = 5.0, 20.0
_HORIZONTAL = {1: "left", 0: "center", -1: "right"}
_VERTICAL = {1: "bottom", 0: "center", -1: "top"}


def place_labels(
    axes: Axes, points: Sequence[tuple[float, float]], bars: Sequence[float], names: Sequence[str]
) -> None:
    """Name `points`, which have error `bars` of half that height, in the order given.

    The figure was drawn before, so that it is known where everything lies.
    """
    scale = axes.figure.dpi / 72  # pixels of a point of type
    taken = [box for p, bar in zip(points, bars, strict=True) for box in _mark(axes, p, bar, scale)]
    places = [(right, up, far) for far in FAR for right, up in AROUND]
    for point, name in zip(points, names, strict=True):
        label = axes.annotate(
            name,
            point,
            (0, 0),
            textcoords="offset points",
            fontsize=SIZE,
            zorder=BEHIND,
            bbox={"facecolor": GROUND, "linewidth": 0, "pad": 0.5},  # over lines of the grid
            arrowprops={"arrowstyle": "-", "color": FAINT, "linewidth": 0.7, "shrinkA": 0},
        )
        label.set_in_layout(False)
        label.arrow_patch.set_visible(False)
        size = label.get_window_extent().size
        middle = axes.transData.transform(point)
        boxes = [_box(middle, size, *place, scale) for place in places]
        costs = [_cost(box, taken, axes.bbox) / scale**2 + rank for rank, box in enumerate(boxes)]
        best = costs.index(min(costs))
        right, up, far = places[best]
        label.set(ha=_HORIZONTAL[_sign(right)], va=_VERTICAL[_sign(up)])
        label.set_position((right * far * GAP, up * far * GAP))
        label.arrow_patch.set_visible(far >= LED)
        taken.append(boxes[best])


def _box(
    middle: Sequence[float],
    size: Sequence[float],
    right: float,
    up: float,
    far: float,
    scale: float,
) -> Bbox:
    """The box in pixels of a name of that size at this place of a point at `middle`, with room."""
    ends = []
    for at, extent, way in zip(middle, size, (right, up), strict=True):
        near = at + way * far * GAP * scale + (_sign(way) - 1) / 2 * extent
        ends.append((near - scale, near + extent + scale))
    (left, right_end), (low, high) = ends
    return Bbox.from_extents(left, low, right_end, high)


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def _mark(axes: Axes, point: tuple[float, float], bar: float, scale: float) -> list[Bbox]:
    """The boxes of a marker and its error bar, in pixels."""
    (x, y), size = axes.transData.transform(point), MARK * scale
    low, high = (axes.transData.transform((point[0], point[1] + end))[1] for end in (-bar, bar))
    return [
        Bbox.from_extents(x - size, y - size, x + size, y + size),
        Bbox.from_extents(x - size / 3, low, x + size / 3, high),
    ]


def _cost(box: Bbox, taken: Sequence[Bbox], panel: Bbox) -> float:
    """Of the pixels of `box` that lie over something else, or outside of the `panel`."""
    over = sum(_area(Bbox.intersection(box, other)) for other in taken)
    return OVER * over + OUTSIDE * (_area(box) - _area(Bbox.intersection(box, panel)))


def _area(box: Bbox | None) -> float:
    return 0.0 if box is None else box.width * box.height
