"""--json FILE of commands that measure: refused before any work, written or printed after it."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from twellctl.files.outputs import check_json_path, write_file
from twellctl.files.strict_json import json_text

STDOUT = Path("-")
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write all figures here; - is stdout.")
]


def telling(path: Path | None, key: str, kind: str) -> Callable[[Any, Callable[[Any], None]], None]:
    """Refuse a file that could not be written, or that is not a JSON of that `kind`, with `key`.

    What is returned tells a result: its JSON on stdout in the place of the screen, or in the file
    `path` beside it. Neither is lost where the other fails.
    """

    def check() -> None:
        if path is not None and path != STDOUT:
            check_json_path(path, key, kind)

    def tell(found: Any, screen: Callable[[Any], None]) -> None:
        if path == STDOUT:
            print(json_text(found.to_json()), end="")
            return
        try:
            screen(found)
        finally:
            if path is not None:
                write_file(path, json_text(found.to_json()), check)

    check()
    return tell
