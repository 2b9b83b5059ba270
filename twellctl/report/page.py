"""A report on one model as one HTML file, which loads nothing and runs nothing.

Text of models and people only ever becomes text: the template escapes all it is given.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from twellctl.report.charts import Chart

KEY = '<meta name="generator" content="twellctl">'  # by which such a file is known


@dataclass(frozen=True)
class Picture:
    """A plot as an SVG; `alt` says what it shows."""

    alt: str
    svg: bytes

    @property
    def base64(self) -> str:
        return base64.b64encode(self.svg).decode()


@dataclass(frozen=True)
class Table:
    """`columns` and `rows`, whose first cells name them; `note` says below it what they are."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Answers:
    """Two answers to a question: `what` became of them, the `common` text, how each goes on."""

    what: str
    question: str
    common: str
    names: tuple[str, str]
    rest: tuple[str, str]

    @property
    def columns(self) -> list[tuple[str, str, str]]:
        """(name, the first word that differs, what comes after it) of each."""
        made = []
        for name, rest in zip(self.names, self.rest, strict=True):
            indent = len(rest) - len(rest.lstrip())
            first = rest.split(maxsplit=1)[0] if rest.strip() else ""
            end = indent + len(first)
            made.append((name, rest[:end], rest[end:]))
        return made


@dataclass(frozen=True)
class Page:
    """What the report says, from its top to its end; what is empty is left out.

    `verdict` in words and `because`; `sentences` below it; `facts` by name; the `recipe` to make it
    again.
    """

    title: str
    verdict: str = ""
    because: str = ""
    is_bad: bool = False
    sentences: Sequence[str] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    answers: Sequence[Answers] = ()
    facts: Sequence[tuple[str, str]] = ()
    recipe: str = ""


def html_of(page: Page) -> str:
    """The whole file."""
    return _template().render(page=page) + "\n"


def pictures_of(charts: Sequence[Chart]) -> list[Picture]:
    """Charts, drawn; matplotlib must be there."""
    from twellctl.report.plot_style import content_of
    from twellctl.report.plots import draw

    return [Picture(chart.title, content_of(draw(chart), "svg")) for chart in charts]


@cache
def _template() -> Any:
    import jinja2

    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(text)
