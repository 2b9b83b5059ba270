"""Tables of a model card, in which others' text means nothing."""

from collections.abc import Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str | None:
    """In Markdown; None where there is no row."""
    rows = list(rows)
    if not rows:
        return None
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines)


def cell(value: object) -> str:
    """Its text, or "?" where that would mean something in a card."""
    text = str(value)
    return text if is_plain(text) else "?"


def is_plain(text: str) -> bool:
    """Whether others' text can stand in a card without meaning anything there."""
    return text.isprintable() and not set("`|<>[]") & set(text)
