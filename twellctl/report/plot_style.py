"""How all plots look, light and dark, and how a figure becomes a file.

An SVG has its own ground and both sets of colours, of which the reader's browser takes one
(`prefers-color-scheme`): it reads on any page, and one file is enough. PNG and PDF are light. Text
stays text, so the font is a common one.
"""

import contextlib
import io
from collections.abc import Iterator

import matplotlib
from matplotlib.figure import Figure

GROUND, INK, FAINT, GRID = "#ffffff", "#1c2024", "#5d6670", "#dfe2e6"
# told apart by those who see few colours, too, and each 3 to 1 against its ground
SERIES = ("#0b6e66", "#d2600f", "#5a49c2", "#2a8fd4")
DARK = {  # what takes their places on a dark ground
    GROUND: "#15181b",
    INK: "#e6e9ec",
    FAINT: "#98a2ac",
    GRID: "#33393f",
    SERIES[0]: "#3fb8a9",
    SERIES[1]: "#f5a05a",
    SERIES[2]: "#9d90f5",
    SERIES[3]: "#86cbf7",
}
WIDTH = 6.6  # inches of every plot: 634 pixels of a page
_STYLE = {
    "figure.facecolor": GROUND,
    "savefig.facecolor": GROUND,
    "axes.facecolor": GROUND,
    "axes.edgecolor": FAINT,
    "grid.color": GRID,
    "text.color": INK,
    "axes.titlecolor": INK,
    "axes.labelcolor": FAINT,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
    "font.size": 9.5,
    "figure.titlesize": 11.5,
    "figure.titleweight": "bold",
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.labelsize": 9.5,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "legend.fontsize": 9.5,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "ytick.major.size": 0,
    "lines.linewidth": 2,
    "lines.markersize": 5,
    "text.parse_math": False,  # a $ in a name is one
    "savefig.dpi": 200,
    "svg.fonttype": "none",
    "svg.hashsalt": "twellctl",  # the same figure makes the same file
    "pdf.fonttype": 42,
}


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """Inside, figures are made and written in this style, whatever the user's own one is."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def content_of(figure: Figure, kind: str) -> bytes:
    """The file of a `styled` figure: "svg", "png" or "pdf"."""
    made = io.BytesIO()
    metadata = {"svg": {"Creator": "twellctl", "Date": None}, "png": {"Software": "twellctl"}}
    metadata["pdf"] = {"Creator": "twellctl", "CreationDate": None}
    with styled():
        figure.savefig(made, format=kind, metadata=metadata[kind])
    if kind != "svg":
        return made.getvalue()
    return made.getvalue().replace(b"</style>", _dark_rules().encode() + b"</style>", 1)


def _dark_rules() -> str:
    """Style sheets win over colours in `style` attributes, by which matplotlib gives them."""
    rules = [
        f'[style*="{part}: {light}"] {{{part}: {dark} !important}}'
        for light, dark in DARK.items()
        for part in ("fill", "stroke")
    ]
    return "\n".join(["", "@media (prefers-color-scheme: dark) {", *rules, "}", ""])
