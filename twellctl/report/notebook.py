"""Results in a notebook: a dataclass as tables, of what it holds and of the rows within."""

import html
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from twellctl.errors import bounded, encodable

_ALSO = ("density", "verdict")  # properties, where a result has them
_LONGEST = 300  # characters of a cell


class Shown:
    """A dataclass that a notebook shows as tables."""

    def _repr_html_(self) -> str:
        return as_tables(self)


def element(name: str, text: str) -> str:
    """An HTML element of that name which shows `text`."""
    return f"<{name}>{html.escape(encodable(text))}</{name.split()[0]}>"


def as_tables(result: Any) -> str:
    """Its plain fields in one table, then one for each list of dataclasses; None is left out."""
    facts, below = [], []
    for name, value in _named(result):
        if is_dataclass(value) and type(value).__str__ is object.__str__:
            below += [element("h4", name), as_tables(value)]
        elif isinstance(value, list | tuple) and value and is_dataclass(value[0]):
            columns = [column for column, _ in _named(value[0])]
            rows = [[str(i), *(_cell(c) for _, c in _named(row))] for i, row in enumerate(value)]
            below += [element("h4", name), _table(["", *columns], rows)]
        elif value is not None:
            facts.append([name, _cell(value)])
    return "".join([_table(["", ""], facts), *below])


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first column names the rows."""
    head = "".join(element('th scope="col"', column) for column in columns)
    body = ""
    for first, *cells in rows:
        made = element('th scope="row"', first), *(element("td", cell) for cell in cells)
        body += f"<tr>{''.join(made)}</tr>"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _named(result: Any) -> list[tuple[str, Any]]:
    names = dict.fromkeys([*(field.name for field in fields(result)), *_ALSO])
    return [(n.replace("_", " "), getattr(result, n)) for n in names if hasattr(result, n)]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return bounded(", ".join(map(_cell, value)), _LONGEST)
    if isinstance(value, dict):
        return bounded(", ".join(f"{key} {_cell(cell)}" for key, cell in value.items()), _LONGEST)
    return "" if value is None else bounded(str(value), _LONGEST)
