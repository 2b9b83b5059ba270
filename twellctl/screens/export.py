"""What `twellctl export` says."""

from typing import Any

from twellctl.screens import ui


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
