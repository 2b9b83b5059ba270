"""bench decode on a GPU, with small shapes: all forms run, choose alike, and the JSON is whole."""

import json

import pytest
from on_gpu import on_e4m3
from shapes import write_config

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 16384,
    "max_position_embeddings": 2048,
}
SHORT = ("--prompt-tokens", "32", "--new-tokens", "40", "--density", "0.02")


def test_a_model_in_all_forms(cli, tmp_path):
    words = ("--batch", "1", "--batch", "5", "--json", "-")
    words += ("--config", write_config(tmp_path, **SIZES))
    code, out, err = cli("bench", "decode", *SHORT, *words)
    assert code == 0, err[-1]
    found = json.loads(out)
    (model,) = found["models"]
    assert model["without_twell"] is None
    for point in model["points"]:
        names = ["dense", "dense FP8", "twell"]
        assert list(point["forms"]) == [n for n in names if n not in point["skipped"]]
        assert set(point["skipped"]) <= {"dense FP8"}  # before compute capability 8.9
        for name, form in point["forms"].items():
            assert form["shortfall"] < (0.3 if "FP8" in name else 0.1), name
            assert form["density"] == pytest.approx(0.02, rel=0.2), name
            assert 0.01 < form["ms"] < 1000, name
        assert point["forms"]["twell"]["floor_bytes"] < point["forms"]["dense"]["floor_bytes"]
        assert point["forms"]["dense"]["over_dense"] == 1
    assert "x " in found["sentences"][0]
    assert found["sentences"][0].startswith("on this GPU this model (random, 2 layers, ")


@on_e4m3
def test_a_model_in_fp8_in_all_forms(cli, tmp_path):
    words = ("--batch", "1", "--batch", "5", "--quantize", "fp8", "--json", "-")
    words += ("--config", write_config(tmp_path, **SIZES))
    code, out, err = cli("bench", "decode", *SHORT, *words)
    assert code == 0, err[-1]
    found = json.loads(out)
    (model,) = found["models"]
    for point in model["points"]:
        assert (list(point["forms"]), point["skipped"]) == (["dense", "dense FP8", "twell FP8"], {})
        dense, fp8, twell = point["forms"].values()
        assert twell["floor_bytes"] < fp8["floor_bytes"] < dense["floor_bytes"]
        assert max(form["shortfall"] for form in (fp8, twell)) < 0.3
        assert twell["over_fp8"] > 0
    assert "this model in FP8 (random, 2 layers, " in found["sentences"][0]


def test_a_model_that_does_not_fit_is_refused(cli):
    code, _, err = cli("bench", "decode", "--layers", "2000")
    assert code == 1
    assert "random Llama with 2000 layers needs " in err[-1]
    assert " or fewer" in err[-1]
