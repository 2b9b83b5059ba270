"""bench decode --ffn on the CPU: one FFN in its forms, its floors, and what it refuses."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from twellctl.bench.decode_forms import few_weights, torch_ffn, weights_of
from twellctl.bundle.twell_model import gated_ffns


@pytest.fixture(autouse=True)
def _less(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr("twellctl.bench.decode_forms.COPIED_BYTES", {"cpu": 1 << 20})


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_weights_of_a_model_compute_its_ffn(make_model, family):
    model = AutoModelForCausalLM.from_pretrained(make_model(family, hidden_act="relu"))
    x = torch.randn(5, 32)
    for ffn in gated_ffns(model):
        weights = weights_of(ffn)
        with torch.no_grad():
            torch.testing.assert_close(torch_ffn(x, weights), ffn(x))
        assert weights.ffn.w_down.is_contiguous()
        assert weights.down.is_contiguous()


def test_either_layout_of_down_is_taken():
    w_gate, w_up, w_down = torch.randn(24, 16), torch.randn(24, 16), torch.randn(16, 24)
    turned = w_down.t().contiguous().t()
    for given in (w_down, turned):
        weights = few_weights(w_gate, w_up, given, None, None, None)
        assert torch.equal(weights.down, w_down)
        assert torch.equal(weights.ffn.w_down, w_down.t())
        assert weights.down.is_contiguous()
        assert weights.ffn.w_down.is_contiguous()


def test_one_ffn_alone(cli):
    words = ("--hidden-size", "512", "--intermediate-size", "1024", "--rounds", "1")
    words += ("--device", "cpu", "--batch", "1", "--batch", "16", "--density", "0.05")
    code, out, err = cli("bench", "decode", "--ffn", *words, "--json", "-")
    assert code == 0, err
    found = json.loads(out)
    assert found["command"] == "bench decode --ffn"
    assert [point["tokens"] for point in found["points"]] == [1, 16]
    for point in found["points"]:
        assert list(point["candidates"]) == ["dense eager", "twell plain"]
        assert all(0 < c["error"] < 0.01 for c in point["candidates"].values())
        assert point["floor_bytes"]["dense"] == 3 * 512 * 1024 * 2
        union = point["fired_for_some_token"]
        assert point["floor_bytes"]["twell"] == pytest.approx(512 * 1024 * 2 * (1 + 2 * union))
        assert point["floor_ms"]["dense"] == pytest.approx(
            point["floor_bytes"]["dense"] / found["bandwidth_gb_s"] / 1e6
        )
    one, many = found["points"]
    assert one["fired_for_some_token"] == pytest.approx(one["density"])
    assert many["fired_for_some_token"] == pytest.approx(1 - 0.95**16, rel=0.15)
    code, out, _ = cli("bench", "decode", "--ffn", *words)
    assert code == 0
    assert "batch 16, density " in out
    assert "over dense" in out
    assert out.splitlines()[-1].startswith("on this CPU this FFN of 512 x 1024 at 5.00% density is")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--hidden-size", "100"], "hidden-size must be a multiple of 64, got 100"),
        (["--batch", "65"], "batch must be >= 1 and <= 64, got 65"),
        (["--density", "2"], "density must be > 0 and <= 1, got 2"),
        (["--rounds", "0"], "rounds must be >= 1, got 0"),
    ],
)
def test_bad_ffns_are_refused(cli, words, sentence):
    code, out, err = cli("bench", "decode", "--ffn", *words)
    assert (code, out, len(err)) == (2, "", 1)
    assert sentence in err[0]
