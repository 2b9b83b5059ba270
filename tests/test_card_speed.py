"""What a model card says of speed: what bench decode found, and nothing of another model."""

import json

import pytest
from small_benches import decode_form

from twellctl.bench.decode_results import DecodeBench, DecodeModel, DecodePoint
from twellctl.export import export
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import fingerprint

NO_GAIN = "Being sparse makes no step of it faster there."


def bench(of, *points: DecodePoint, without: str | None = None, quantize: str | None = None):
    described = {"fingerprint": fingerprint(open_checkpoint(of))}
    facts = {"device": "NVIDIA H200", "versions": {"twellctl": "0.1.0", "torch": "2.11.0"}}
    model = DecodeModel("this model", described, points, without)
    return DecodeBench(facts, {"quantize": quantize}, 4e12, (model,)).to_json()


def point(batch: int, dense: float, **others: float) -> DecodePoint:
    named = {"dense": dense} | {name.replace("_", " "): took for name, took in others.items()}
    chosen = {"twell": {"chosen": "union"}}
    forms = (decode_form(name, took, **chosen.get(name, {})) for name, took in named.items())
    return DecodePoint(batch, tuple(forms), {})


def card_with(relu_llama, found: dict, folder) -> str:
    file = folder / "bench.json"
    file.write_text(json.dumps(found))
    export(relu_llama, folder / "out", bench=file, quantize=found["settings"]["quantize"])
    return (folder / "out" / "README.md").read_text(encoding="utf-8")


def test_steps_are_told(relu_llama, tmp_path):
    points = point(1, 0.002, twell=0.001), point(16, 0.002, twell=0.0025)
    card = card_with(relu_llama, bench(relu_llama, *points), tmp_path)
    assert "weights in bf16" in card
    assert "on one NVIDIA H200 (twellctl 0.1.0, torch 2.11.0):" in card
    assert "| 1 | 500 | 1000 (union) | 2.00x | - | 2.00% |" in card
    assert "| 16 | 500 | 400 (union) | 0.80x | - | 2.00% |" in card
    assert NO_GAIN not in card


@pytest.mark.parametrize(
    ("took", "gains"), [({"twell": 0.00197}, False), ({"twell": 0.0019}, True)]
)
def test_a_model_that_is_no_faster_says_so(relu_llama, tmp_path, took, gains):
    card = card_with(relu_llama, bench(relu_llama, point(1, 0.002, **took)), tmp_path)
    assert (NO_GAIN not in card) == gains


@pytest.mark.parametrize(("quantize", "gains"), [(None, True), ("fp8", False)])
def test_the_rival_is_dense_in_the_same_precision(relu_llama, tmp_path, quantize, gains):
    found = bench(relu_llama, point(1, 0.002, dense_FP8=0.001, twell=0.001), quantize=quantize)
    card = card_with(relu_llama, found, tmp_path)
    assert f"weights in {'FP8' if quantize else 'bf16'}" in card
    assert "| 1 | 500 | 1000 (union) | 2.00x | 1.00x | 2.00% |" in card
    assert (NO_GAIN not in card) == gains


@pytest.mark.usefixtures("count_less")
def test_what_bench_decode_writes_goes_into_the_card(cli, relu_llama, text_file, tmp_path):
    file = tmp_path / "bench.json"
    words = ["--data", text_file, "--prompt-tokens", 8, "--new-tokens", 12, "--batch", 1]
    code, _, _ = cli("bench", "decode", relu_llama, *words, "--device", "cpu", "--json", file)
    assert code == 0
    code, _, _ = cli("export", relu_llama, tmp_path / "out", "--bench", file)
    assert code == 0
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "by\n`twellctl bench decode` on one CPU (twellctl " in card
    assert "TwELL was not run there: the decode kernels need an NVIDIA GPU." in card


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"command": "bench model"}, "is no bench of decoding that this twellctl reads"),
        ({"schema_version": 2}, "is no bench of decoding that this twellctl reads"),
        ({"models": []}, "is no whole bench of decoding"),
        ({"models": [{"model": {}, "points": []}]}, "is no whole bench of decoding"),
        ({"settings": None}, "is no whole bench of decoding"),
        ({"settings": {"quantize": "fp8"}}, "is of weights in another precision"),
        ({"of another": True}, "is of another model"),
    ],
)
def test_what_is_no_bench_of_it_is_refused(cli, relu_llama, tmp_path, change, sentence):
    found = bench(relu_llama, point(1, 0.002, twell=0.001)) | change
    if "of another" in change:
        found["models"][0]["model"]["fingerprint"] = "0"
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(found))
    code, _, err = cli("export", relu_llama, tmp_path / "out", "--bench", file)
    assert (code, len(err)) == (1, 1)
    assert sentence in err[0]
    assert not (tmp_path / "out").exists()


def test_others_text_means_nothing(relu_llama, tmp_path):
    found = bench(relu_llama, point(1, 0.002), without="<b>none</b>")
    card = card_with(relu_llama, found | {"device": "[x](y)"}, tmp_path)
    assert "[x](y)" not in card
    assert "<b>" not in card
    assert "TwELL was not run there." in card
