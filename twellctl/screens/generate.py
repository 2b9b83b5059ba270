"""What `twellctl generate` says of itself."""

from typing import Any

from twellctl.screens import ui


def generated(figures: Any) -> None:
    """What a generation has done (a `Figures`), on stderr; nothing if nothing came."""
    if not figures.tokens:
        return
    if figures.is_empty:
        ui.note("the model ended its answer at once, without a word")
    parts = [f"{figures.prompt_tokens} + {figures.tokens} tokens"]
    parts.append(f"the first after {figures.first_seconds:.2f} s")
    if figures.tokens_per_second is not None:
        parts.append(f"then {figures.tokens_per_second:.1f} tokens/s")
    if figures.density is not None:
        parts.append(f"{figures.density:.2%} of the neurons fired")
    if figures.cut:
        parts.append("cut at --max-tokens")
    ui.note(", ".join(parts))
