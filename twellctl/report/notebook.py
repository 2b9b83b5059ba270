"""Results in a notebook: a dataclass as tables, of what it holds and of the rows within."""

from dataclasses import fields, is_dataclass
from typing import Any

from twellctl.errors import bounded
from twellctl.report.markup import Markup, joined, table, tag

_ALSO = ("density", "verdict")  # properties, where a result has them
_LONGEST = 300  # characters of a cell


class Shown:
    """A dataclass that a notebook shows as tables."""

    def _repr_html_(self) -> str:
        return as_tables(self)


def as_tables(result: Any) -> Markup:
    """Its plain fields in one table, then one for each list of dataclasses; None is left out."""
    facts, below = [], []
    for name, value in _named(result):
        if is_dataclass(value) and type(value).__str__ is object.__str__:
            below += [tag("h4", name), as_tables(value)]
        elif isinstance(value, list | tuple) and value and is_dataclass(value[0]):
            columns = [column for column, _ in _named(value[0])]
            rows = [[i, *(_cell(c) for _, c in _named(row))] for i, row in enumerate(value)]
            below += [tag("h4", name), table(["", *columns], rows)]
        elif value is not None:
            facts.append([name, _cell(value)])
    return joined([table(["", ""], facts), *below])


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
