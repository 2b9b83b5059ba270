"""HTML elements made of Python values. All text is escaped; only `Markup` is not."""

import html
from collections.abc import Iterable, Sequence

from twellctl.errors import encodable


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, *children: str | None, **attributes: object) -> Markup:
    """The element `name`; attributes that are None, and children that are None, are left out.

    `class_` stands for class, and an underscore within a name for a hyphen.
    """
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(_as_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = "".join(escaped(child) for child in children if child is not None)
    return Markup(f"<{name}{said}>{inside}</{name}>")


def escaped(text: str) -> Markup:
    """`text` as markup that shows it; `Markup` as it is."""
    if isinstance(text, Markup):
        return text
    return Markup(html.escape(encodable(text)))


def joined(parts: Iterable[str]) -> Markup:
    """The parts, one after the other."""
    return Markup("".join(escaped(part) for part in parts))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Markup:
    """A table whose first column is text and whose others are numbers."""
    head = tag("tr", *(tag("th", column, scope="col") for column in columns))
    body = [
        tag("tr", tag("th", str(first), scope="row"), *(tag("td", str(cell)) for cell in cells))
        for first, *cells in rows
    ]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="scroll")


def _as_text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return encodable(str(value))
