"""The file of a report: its head, its sections, its style, and what it may do."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from twellctl.report.markup import Markup, escaped, tag

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="twellctl">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


@dataclass(frozen=True)
class Section:
    """A heading, and what stands under it."""

    title: str
    content: Sequence[str]


@dataclass(frozen=True)
class Tile:
    """A figure that is seen first: what it is, its value, and a few words about it."""

    name: str
    value: str
    about: str = ""


def page(
    title: str, about: str, tiles: Sequence[Tile], advice: Sequence[str], sections: list[Section]
) -> str:
    """The whole file. It loads nothing and runs no script."""
    body = tag(
        "main",
        tag("header", tag("h1", title), tag("p", about, class_="about")),
        tag("div", *map(_tile, tiles), class_="tiles"),
        _advice(advice),
        *(tag("section", tag("h2", s.title), *s.content) for s in sections if s.content),
    )
    style = colours() + _file("report.css")
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return _PAGE.format(policy=policy, title=escaped(title), style=style, body=body)


def is_page(path: Path) -> bool:
    """Whether the file `path` is a page that twellctl wrote."""
    with path.open("rb") as file:
        return b'<meta name="generator" content="twellctl">' in file.read(2000)


def colours() -> str:
    """The colours of all pages, light and dark, as custom properties of CSS."""
    return _file("colours.css")


def _tile(tile: Tile) -> Markup:
    return tag(
        "div",
        tag("p", tile.name, class_="name"),
        tag("p", tile.value, class_="value"),
        tag("p", tile.about, class_="about") if tile.about else None,
        class_="tile",
    )


def _advice(sentences: Sequence[str]) -> Markup | None:
    if not sentences:
        return None
    items = tag("ul", *(tag("li", sentence) for sentence in sentences))
    return tag("section", tag("h2", "Advice"), items, class_="advice")


def _file(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    """What a policy calls an element that holds just this."""
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
