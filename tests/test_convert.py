"""convert: only the activation changes, for every family, without touching a weight."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from twellctl.convert import convert


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3"])
def test_logits_are_those_of_the_same_weights_with_relu(make_model, tmp_path, family):
    source = make_model(family, seed=1)
    convert(source, tmp_path / "out")
    ids = torch.randint(0, 512, (2, 17))
    expected = AutoModelForCausalLM.from_pretrained(source, hidden_act="relu")(ids).logits
    silu = AutoModelForCausalLM.from_pretrained(source)(ids).logits
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(model(ids).logits, expected)
    assert not torch.allclose(expected, silu)
    twell = json.loads((tmp_path / "out/config.json").read_text())["twell"]
    assert twell == {
        "format_version": 1,
        "tile": 256,
        "slots": [64, 64],
        "thresholds": [0.0, 0.0],
        "source": str(source.resolve()),
        "source_act": "silu",
    }
