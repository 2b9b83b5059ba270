"""What `write` says while it writes: how far it is, how fast, and what is still to come."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from twellctl.screens import ui

if TYPE_CHECKING:
    from twellctl.write import Going

_EVERY = 30  # seconds, off a terminal, where each is a line


def stages() -> tuple[Callable[[str], None], Callable[["Going"], None]]:
    """(`begin(text)`, `show(going)`): what comes next, and how far it has come."""
    begun, next_line = [""], [0.0]

    def begin(text: str) -> None:
        begun[0] = text
        ui.doing(text)

    def show(going: "Going") -> None:
        if not ui.stderr.is_terminal and going.seconds < next_line[0]:
            return
        next_line[0] = going.seconds + _EVERY
        left = going.seconds * (1 - going.share) / going.share if going.share else 0
        speed = going.drawn / going.seconds if going.seconds else 0
        to_go = f", {ui.duration(left)} to go" if going.share else ""
        ui.doing(f"{begun[0]}: {going.share:.0%}, {speed:.0f} tokens/s{to_go}")

    return begin, show
