"""Pages go to their files here, whole or not at all, and never cost what they show."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from twellctl.errors import TwellError, UsageError, reason
from twellctl.files.outputs import check_file, write_file
from twellctl.firing.profiled import Profile
from twellctl.models.carried import METRICS_FILE
from twellctl.report.of_profile import profile_page
from twellctl.report.of_run import RUN_PAGE, read_rows, run_page
from twellctl.report.page import is_page


def check_page_path(path: Path, other: Path | None = None) -> None:
    """Refuse, before any work, a page that could not be written, or would replace something else.

    `other` is another file that the same call writes.
    """
    if path == Path("-"):
        raise UsageError("--html writes a file, got -: name one")
    if other is not None and path.absolute() == other.absolute():
        raise UsageError(f"--html and --json both name {path}: give them two names")
    check_file(path, "the HTML file", "page of twellctl", is_page)


def write_profile_page(profile: Profile, path: Path) -> None:
    """Draw `profile` and write it to `path`; `TwellError` where it cannot be drawn."""
    try:
        text = profile_page(profile)
    except Exception as error:  # the figures are out by now: a page must not hide them in a trace
        raise TwellError(
            f"{path} could not be drawn ({type(error).__name__}: {reason(error)}): all else that "
            "was asked for is written; please report it"
        ) from error
    write_file(path, text, lambda: check_page_path(path))


def write_run_page(folder: Path, report: dict[str, Any], note: Callable[[str], None]) -> None:
    """Draw the run that made the model in `folder` beside its metrics; `note` says if it fails.

    `report` is what the run ended with, and by "recipe" its settings.
    """
    try:
        text = run_page(report["out"], read_rows(folder / METRICS_FILE), report)
    except Exception as error:  # the model is worth more than its page
        note(f"{RUN_PAGE} could not be drawn ({type(error).__name__}: {reason(error)})")
        return
    (folder / RUN_PAGE).write_text(text, encoding="utf-8")
