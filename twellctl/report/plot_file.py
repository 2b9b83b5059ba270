"""The file of a plot: refused before any work, or written whole. matplotlib is imported late."""

import importlib.util
from pathlib import Path

from twellctl.errors import TwellError, UsageError
from twellctl.files.outputs import check_file, write_file
from twellctl.report.charts import Chart

_BEGINNINGS = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}
_MAKER = b"twellctl"  # which every plot names as its maker
KINDS = ", ".join(_BEGINNINGS)


def check_plot(path: Path) -> None:
    """Refuse a `path` that no plot can be written to, or that would be lost; or no matplotlib."""
    if _kind(path) not in _BEGINNINGS:
        raise UsageError(f"a plot is an svg, png or pdf, by its ending: name {path} so")
    if importlib.util.find_spec("matplotlib") is None:
        raise TwellError("matplotlib, which draws plots, is not installed: pip install matplotlib")
    check_file(path, "the plot", "plot of twellctl", _is_plot)


def write_plot(chart: Chart, path: Path) -> None:
    """Draw `chart` into a file, replacing an older plot."""
    from twellctl.report.plot_style import content_of
    from twellctl.report.plots import draw

    content = content_of(draw(chart), _kind(path))
    write_file(path, content, lambda: check_plot(path))


def _kind(path: Path) -> str:
    return path.suffix.removeprefix(".").lower()


def _is_plot(path: Path) -> bool:
    content = path.read_bytes()
    return content.startswith(_BEGINNINGS[_kind(path)]) and _MAKER in content
