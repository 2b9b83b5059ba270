"""Settings of small fits, and the families that are fitted, with what they change."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twellctl import convert

QUICK = {"tokens": 2048, "seq_len": 32, "eval_windows": 8, "steps": 0, "density": 1.0}


GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 8, "pad_token_id": 0}
FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "phi3": {},
    "qwen2": {"tie_word_embeddings": True},
    "gemma2": GEMMA | {"sliding_window": 16},
    "gemma": {"head_dim": 8, "hidden_act": "gelu_pytorch_tanh", "pad_token_id": 0},
    "granite": {"residual_multiplier": 0.3, "embedding_multiplier": 2.0, "pad_token_id": 0},
    "cohere": {"pad_token_id": 0},
}


def fits_of(model: Path, text: Path, folders: Any, settings: Mapping[str, Mapping]) -> dict:
    """Quick fits of `model` on `text` in folders of pytest's factory, by names of `settings`."""
    made = {}
    for name, how in settings.items():
        made[name] = folders.mktemp("fits") / "fit"
        convert(model, made[name], data=[str(text)], **QUICK | how)
    return made
