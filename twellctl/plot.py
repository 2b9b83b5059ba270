"""twellctl plot: several evaluations in one plot, tasks kept against bytes read for a token."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twellctl.errors import TwellError, UsageError, shown
from twellctl.evaluation.kept import chart_of, point_of
from twellctl.evaluation.results import VERSION_KEY
from twellctl.files.home import from_home
from twellctl.files.strict_json import read_json
from twellctl.report.charts import Point
from twellctl.report.plot_file import check_plot, write_plot
from twellctl.text.files import kind_and_path

POINTS_KEY = "points"  # by which a file of points is known
# of a point of such a file; what is in percent is of the original's. Others are for people
_FIELDS = {
    "label": str,
    "bytes_percent": float,
    "kept_percent": float,
    "stderr_percent": float,
    "original": str,
    "series": str,
}


def plot(files: Sequence[str | Path], out: str | Path) -> list[Point]:
    """Draw the points of `files` into `out`, an svg, png or pdf by its ending; returns them.

    A file is the JSON of `twellctl eval`, whose point is called NAME if it is given as NAME=FILE
    and like its model otherwise; or a list of points: {"points": [{"label", "bytes_percent",
    "kept_percent", "stderr_percent", "original", "series"}]}. Raises `TwellError`.
    """
    if not files:
        raise UsageError("nothing to plot: name a file of 'twellctl eval --json'")
    out = from_home(out)
    check_plot(out)
    points = [point for file in files for point in read_points(str(file))]
    write_plot(chart_of(points), out)
    return points


def read_points(entry: str) -> list[Point]:
    """The points of FILE or NAME=FILE; `TwellError` if it holds none."""
    name, file = kind_and_path(entry)
    path = from_home(file)
    content, is_named = read_json(path), file != entry
    if VERSION_KEY in content:
        return [point_of(content, path, name if is_named else None)]
    rows = content.get(POINTS_KEY)
    if not isinstance(rows, list) or not rows:
        raise TwellError(
            f"{path} holds neither an evaluation nor points: give what 'eval --json' wrote"
        )
    if is_named:
        raise UsageError(f"{path} is a list of points, which have their labels: leave out {name}=")
    return [_point(row, f"{path}: point {number}") for number, row in enumerate(rows)]


def _point(row: Any, where: str) -> Point:
    if not isinstance(row, dict):
        raise TwellError(f"{where} must be an object, got {shown(row)}")
    row = {"series": ""} | row
    for name, kind in _FIELDS.items():
        taken = (int, float) if kind is float else (str,)
        if type(row.get(name)) not in taken or (kind is float and not row[name] >= 0):
            what = "a number, 0 or more" if kind is float else "a text"
            raise TwellError(f"{where}: {name} must be {what}, got {shown(row.get(name))}")
    if not row["bytes_percent"]:
        raise TwellError(f"{where}: bytes_percent must be above 0")
    return Point(
        label=row["label"],
        bytes_read=row["bytes_percent"] / 100,
        kept=row["kept_percent"] / 100,
        stderr=row["stderr_percent"] / 100,
        original=row["original"],
        series=row["series"],
    )
