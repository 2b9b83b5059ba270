"""What commands that make a model say: write, export, quickstart. No torch."""

from typing import Any

from twellctl.screens import ui


def written_so_far(stage: ui.Stage, going: Any) -> None:
    """How far the texts of a `stage` have come (a `Going`)."""
    speed = going.drawn / going.seconds if going.seconds else 0
    left = going.seconds * (1 - going.share) / going.share if going.share else None
    stage.tell(f"{going.share:.0%}, {speed:.0f} tokens/s", left)


def exported(result: Any) -> None:
    """What an `Exported` folder holds, and how it loads."""
    low, high = min(result.slots), max(result.slots)
    slots = f"{low} to {high}" if low < high else f"{low}"
    how = "from the profile" if result.profiled else "no profile given"
    ui.say(f"{result.out}: {result.class_name}, tile {result.tile}, slots {slots} ({how})")
    ui.say(f"ReLU written as SiLU of sharpness {result.sharpness}: engines that know SiLU run it")
    if result.quantize == "fp8":
        ui.say(
            "its linear layers are FP8; from_pretrained(..., trust_remote_code=True) loads it, and"
        )
        ui.say("without that transformers needs the package compressed-tensors")
    else:
        ui.say(
            "it runs over TwELL with from_pretrained(..., trust_remote_code=True), dense without"
        )
    if result.over_twell_in_vllm:
        ui.say("vLLM serves it over TwELL where twellctl is installed, dense elsewhere")
    else:
        ui.say("vLLM serves it dense, where twellctl is installed with --model-impl transformers")
    ui.say(f"next: twellctl generate {ui.word(result.out)} PROMPT")


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
