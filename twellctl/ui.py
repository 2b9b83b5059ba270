"""The screen: tables and results to stdout, errors and progress to stderr. No torch."""

from rich.console import Console
from rich.table import Table

stdout = Console(highlight=False)
stderr = Console(stderr=True, highlight=False)


def say(text: str) -> None:
    """One line of result."""
    stdout.print(text, markup=False, soft_wrap=True)


def note(text: str) -> None:
    """One line beside the result, on stderr."""
    stderr.print(text, markup=False, soft_wrap=True)


def fail(text: str) -> None:
    """The one line of an error."""
    stderr.print("error: " + " ".join(text.split()), markup=False, soft_wrap=True)


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A table whose first column is text and whose others are numbers."""
    made = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number else "left")
    for row in rows:
        made.add_row(*row)
    stdout.print(made)
