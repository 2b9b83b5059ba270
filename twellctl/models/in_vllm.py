"""How vLLM serves a model that twellctl wrote: by the plugin, over TwELL, or densely.

This imports no vLLM; the plugin itself is `twellctl/vllm`.
"""

from twellctl.bundle.twell_config import rounded_kind, stays_silu

# vLLM's classes that the plugin stands in for; each has gate_up_proj and down_proj in its layers.
ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
DENSELY = "--model-impl transformers"  # vLLM's transformers backend runs what transformers does


def is_served_over_twell(config: dict) -> bool:
    """Whether the plugin takes an export with this config.json: one with a profile."""
    (name, *_) = config.get("architectures") or [""]
    twell = config["twell"]
    plain = not any(map(stays_silu, twell.get("sharpness", []))) and rounded_kind(config) != "int4"
    return name in ARCHITECTURES and "densities" in twell and plain
