"""What `twellctl doctor` says."""

from typing import Any

from twellctl.screens import ui


def diagnosed(result: Any) -> None:
    """The findings of a `Diagnosis`, each with what to do about it."""
    for finding in (*result.machine, *result.folder):
        ui.say(f"{finding.state:5}{finding.name:12}{finding.what}")
        if finding.advice:
            ui.say(f"{'':17}-> {finding.advice}")
