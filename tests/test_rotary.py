"""An export's config.json has its rotary settings under the names of all readers."""

import copy

import pytest
from transformers import AutoConfig

from twellctl.models.rotary import for_all_readers

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "factor": 8.0}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
FACTORS = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
LONG = {"original_max_position_embeddings": 64}
TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}


def plain(theta: float, **more: float) -> dict:
    return {"rope_type": "default", "rope_theta": theta} | more


def new(parameters: dict, **more: object) -> dict:
    """As transformers 5 writes it."""
    return {"rope_parameters": parameters, **more}


def read(config: dict) -> dict:
    """What transformers 5 makes of it."""
    found = AutoConfig.for_model(**copy.deepcopy(config)).rope_parameters
    return {key: value for key, value in found.items() if key != "type"}


@pytest.mark.parametrize(
    ("family", "given", "old"),
    [
        ("llama", new(plain(5e5)), {"rope_theta": 5e5}),
        ("llama", {"rope_theta": 5e5, "rope_scaling": None}, {"rope_theta": 5e5}),
        ("llama", {}, {"rope_theta": 1e4}),
        ("llama", {"rope_theta": 1e4} | new(plain(5e5)), {"rope_theta": 5e5}),
        ("llama", new(LLAMA3 | {"rope_theta": 5e5}), {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
        (
            "llama",
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 8.0}},
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 8.0}},
        ),
        ("qwen2", new(YARN | {"rope_theta": 1e6}), {"rope_theta": 1e6, "rope_scaling": YARN}),
        (
            "stablelm",
            new(plain(1e4, partial_rotary_factor=0.25)),
            {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
        ),
        (
            "phi3",
            new({"rope_type": "longrope", "rope_theta": 1e4} | FACTORS | LONG, **LONG),
            {
                "rope_theta": 1e4,
                "partial_rotary_factor": 1.0,
                "rope_scaling": {"type": "longrope"} | FACTORS,
            },
        ),
        (
            "gemma3_text",
            new(
                {
                    "full_attention": LINEAR | {"rope_theta": 1e6},
                    "sliding_attention": plain(2e4),
                },
                **TWO_KINDS,
            ),
            {"rope_theta": 1e6, "rope_local_base_freq": 2e4, "rope_scaling": LINEAR},
        ),
        ("gemma4_text", TWO_KINDS, {}),  # whose own names older readers do not know
    ],
)
def test_both_names_say_the_same(family, given, old):
    config = {"model_type": family} | SIZES | given
    before = copy.deepcopy(config)
    entries = for_all_readers(config)
    assert config == before
    names = ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor")
    assert {key: value for key, value in entries.items() if key in names} == old
    assert ("rope_parameters" in entries) == bool(old)
    assert read(config | entries) == read(config)
