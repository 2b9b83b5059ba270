"""The page goes to its file here, whole or not at all, and never costs what it shows."""

from pathlib import Path

from twellctl.errors import TwellError, UsageError, reason
from twellctl.files.outputs import check_file, write_file
from twellctl.firing.profiled import Profile
from twellctl.report.of_profile import profile_page
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
