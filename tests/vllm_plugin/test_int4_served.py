"""Exports of models in 4 bits in vLLM itself, built for CPUs. It loads and fuses the layers;
products are its own with AVX-512, else plain ones (ask.py)."""

from pathlib import Path

import pytest
from transformers_judge import PROMPTS, assert_as_transformers, needs_vllm

from twellctl.convert import convert
from twellctl.export import export

pytestmark = needs_vllm
NOISE = 0.1
FIT = {"bits": 4, "group_size": 32, "tokens": 2048, "seq_len": 32, "steps": 2, "step_tokens": 64}


@pytest.fixture(scope="module")
def exports(make_model, text_file, sizes, tmp_path_factory) -> dict[str, Path]:
    """By family; 320 neurons and a map of 64, so that all sizes are multiples of 128. And a SiLU
    model beside its original."""
    made = {}
    for family in ("llama", "phi3", "qwen2"):
        folder = tmp_path_factory.mktemp(f"int4-{family}")
        model = make_model(family, seed=5, **sizes)
        convert(model, folder / "relu", data=[str(text_file)], map_rank=64, **FIT)
        export(folder / "relu", folder / family)
        made[family] = folder / family
    folder, kept = tmp_path_factory.mktemp("int4-silu"), FIT | {"keep_activation": True}
    model = make_model("llama", seed=5, **sizes)
    convert(model, folder / "draft", data=[str(text_file)], **kept)
    export(folder / "draft", folder / "both", with_original=True, original=model)
    return made | {"both": folder / "both"}


def test_vllm_says_what_transformers_says(exports, ask_vllm):
    settings = {"enforce_eager": True, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    answers, log = ask_vllm(*exports.values(), prompts=PROMPTS, **settings)
    assert "its weights are in 4 bits" in log
    for folder, answer in zip(exports.values(), answers, strict=True):
        assert answer["calls"] == 0  # of the plugin's FFNs
        assert_as_transformers(folder, answer["rows"], noise=NOISE)
