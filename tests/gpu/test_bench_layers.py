"""The FFN of each layer, timed on a GPU."""

import pytest
import torch

from twellctl.bench.layers import time_layers
from twellctl.convert import convert
from twellctl.profile import profile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_profile_with_speed(make_model, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr("twellctl.bench.layers.ROUNDS", 1)
    convert(make_model("llama", hidden_size=128, intermediate_size=512), tmp_path / "model")
    words = {"windows": 8, "seq_len": 128, "time_layers": time_layers}
    found = profile(tmp_path / "model", str(text_file), **words)
    assert found.without_speed is None
    assert (found.speed.device, found.speed.tokens) == (torch.cuda.get_device_name(), 1024)
    for layer in found.speed.layers:
        assert layer.dense.startswith("dense")
        assert 0.001 < layer.dense_ms < 100
        assert 0.001 < layer.twell_ms < 100
