"""--json FILE of commands that measure: refused before any work, written or printed after it."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from twellctl.files.outputs import check_json_path, write_file

STDOUT = Path("-")
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write all figures here; - is stdout.")
]


def check_json_file(path: Path | None, key: str, kind: str) -> None:
    """Refuse a file that could not be written, or that is not a JSON of that `kind`, with `key`."""
    if path is not None and path != STDOUT:
        check_json_path(path, key, kind)


def tell(
    path: Path | None,
    text: Callable[[], str],
    screen: Callable[[], None],
    check: Callable[[], None] = lambda: None,
) -> None:
    """`text` on stdout in the place of the screen, or in the file `path` beside it.

    Neither is lost where the other fails. `check`: that of the file, made again.
    """
    if path == STDOUT:
        print(text(), end="")
        return
    try:
        screen()
    finally:
        if path is not None:
            write_file(path, text(), check)
