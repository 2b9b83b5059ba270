"""The speed to expect on a GPU, of small shapes: by itself, and at the end of a dry run."""

import re

import pytest
import torch
from shapes import write_config

from twellctl.bench import expected_speed as module
from twellctl.bench.expected_speed import expected_speed
from twellctl.bundle.twell_nvrtc import what_is_missing
from twellctl.convert import convert

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SIZES = {
    "num_hidden_layers": 3, "hidden_size": 1024, "intermediate_size": 2048,
    "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 16384,
    "max_position_embeddings": 2048,
}  # fmt: skip
WORKS = ["1 row", "16 rows", "a prefill of 2048 tokens"]


@pytest.fixture(autouse=True)
def _has_kernels():
    if said := what_is_missing():
        pytest.skip(said)
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("no kernels for this GPU")


def test_all_three_are_measured(tmp_path):
    found = expected_speed(write_config(tmp_path, **SIZES), 0.02)
    assert found.missing == ()
    assert [speedup.work for speedup in found.speedups] == WORKS
    told = [speedup.over_dense for speedup in found.speedups]
    assert all(0.03 < one < 30 for one in told), told  # other work on the GPU slows either side


def test_fewer_layers_are_measured_where_all_are_too_many(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LAYER_BYTES", 1)
    found = expected_speed(write_config(tmp_path, **SIZES), 0.02)
    assert found.missing == ()
    assert [s.work for s in found.speedups][:2] == [f"{w}, 1 of 3 layers" for w in WORKS[:2]]


def test_a_dry_run_says_it(make_model, cli, text_file, tmp_path):
    silu = make_model("llama", **SIZES)
    convert(silu, tmp_path / "relu")
    words = ("--dry-run", f"--data={text_file}", "--seq-len=64", "--max-steps=2")
    code, out, err = cli("finetune", tmp_path / "relu", tmp_path / "out", *words)
    assert code == 0, err
    (said,) = re.findall(r"speed over dense to expect on this GPU, by random weights: (.+)", out)
    assert re.findall(r"\d\.\d\dx \(([^)]+)\)", said) == WORKS
    assert "not measured" not in out
