"""Shapes of models that benches make at random: config.json files, as a user would give them."""

import json
from pathlib import Path

TINY_CONFIG = str(Path(__file__).with_name("tiny_config.json"))  # 2 layers of 128 x 256

FAMILIES = {
    "llama": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "granite": {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0},
    "gemma2": {"head_dim": 32, "attn_logit_softcapping": 50.0},
    "mistral": {"num_key_value_heads": 1, "head_dim": 32, "sliding_window": 4096},
    "phi3": {"original_max_position_embeddings": 512, "pad_token_id": 32000},
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 32, "layer_types": ["full_attention"] * 3},
}


def write_config(folder: Path, family: str = "llama", **changes: object) -> str:
    """The path of a config.json in `folder`: a SiLU model of 3 layers, 128 x 256."""
    config = {
        "model_type": family,
        "vocab_size": 2048,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "eos_token_id": 2,
    }
    file = folder / "config.json"
    file.write_text(json.dumps(config | FAMILIES[family] | changes))
    return str(file)
