"""What `twellctl quickstart` says at its end."""

from typing import Any

from twellctl.screens import ui


def quickstarted(result: Any) -> None:
    """What changed in the whole job (a `QuickStarted`)."""
    rows = [
        ["SiLU, trained here", f"{result.silu_loss:.3f}", "100.00%", str(result.out / "silu")],
        ["ReLU, converted", f"{result.relu_loss:.3f}", "-", str(result.out / "relu")],
        [
            "ReLU, fine-tuned and exported",
            f"{result.sparse_loss:.3f}",
            f"{result.density:.2%}",
            str(result.export),
        ],
    ]
    ui.say(f"the export writes: {result.text!r}")
    ui.say(
        "(so small a model is still learning, and goes on while it is fine-tuned; a real one loses)"
    )
    ui.table("What changed", ["model", "held-out loss", "neurons firing", "folder"], rows)
    ui.say(f"next: twellctl generate {ui.word(result.export)} 'def '")
