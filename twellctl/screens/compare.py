"""What `twellctl compare` says: each prompt, where two answers part, and how each goes on."""

from typing import Any

from twellctl.screens import ui
from twellctl.screens.eval import answered, in_a_line

BEFORE, BEHIND = 60, 240  # characters shown of the place where two answers part


def compared(result: Any) -> None:
    """A `Compared`."""
    for number, pair in enumerate(result.pairs, 1):
        ui.say(f"{number}. {in_a_line(pair.prompt)}")
        if pair.agrees:
            ui.say(f"   the same to the end, {pair.tokens} tokens: {in_a_line(pair.common)}")
            ui.say("")
            continue
        common = " ".join(pair.common.split())
        before = f", behind ...{common[-BEFORE:]!r}" if common else ""
        ui.say(f"   the same for {pair.tokens} tokens{before}")
        for name, rest, ended, repeats in zip(
            result.names, pair.rest, pair.ended, pair.repeats, strict=True
        ):
            end = " [repeats itself]" if repeats else "" if ended else " [cut]"
            ui.say(f"   {name}: {in_a_line(rest, BEHIND) or '(ends here)'}{end}")
        ui.say("")
    answered(result.score)
    ui.say(f"{result.names[1]}: {result.score.verdict}")
