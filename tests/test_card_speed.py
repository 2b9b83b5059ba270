"""What a model card says of speed: what bench decode found, and nothing of another model."""

import json

import pytest
from small_benches import count_less

from twellctl.bench.decode_results import DecodeBench, DecodeForm, DecodeModel, DecodePoint
from twellctl.bench.results import DENSE, DENSE_FP8, TWELL
from twellctl.convert import convert
from twellctl.export import export
from twellctl.models.checkpoint import fingerprint, open_checkpoint

KINDS = {"twell": TWELL, "dense FP8": DENSE_FP8}
NO_GAIN = "Being sparse makes no step of it faster there."


@pytest.fixture(scope="module")
def relu(silu_llama, tmp_path_factory):
    out = tmp_path_factory.mktemp("relu") / "relu"
    convert(silu_llama, out)
    return out


def form(name: str, seconds: float) -> DecodeForm:
    facts = {
        "chosen": "union" if name == "twell" else None,
        "density": 0.0213,
        "union": 0.1,
        "shortfall": 0.0,
        "floor_bytes": 10,
    }
    facts |= {"floor_seconds": 0.0005, "kind": KINDS.get(name, DENSE)}
    return DecodeForm(name=name, step_seconds=(seconds,) * 3, **facts)


def bench(of, *points: DecodePoint, without: str | None = None, quantize: str | None = None):
    described = {"fingerprint": fingerprint(open_checkpoint(of))}
    facts = {"device": "NVIDIA H200", "versions": {"twellctl": "0.1.0", "torch": "2.11.0"}}
    model = DecodeModel("this model", described, points, without)
    return DecodeBench(facts, {"quantize": quantize}, 4e12, (model,)).to_json()


def point(batch: int, dense: float, **others: float) -> DecodePoint:
    named = {"dense": dense} | {name.replace("_", " "): took for name, took in others.items()}
    return DecodePoint(batch, tuple(form(*pair) for pair in named.items()), {}, {})


def card_with(relu, found: dict, folder) -> str:
    file = folder / "bench.json"
    file.write_text(json.dumps(found))
    export(relu, folder / "out", bench=file, quantize=found["settings"]["quantize"])
    return (folder / "out" / "README.md").read_text(encoding="utf-8")


def test_steps_are_told(relu, tmp_path):
    points = point(1, 0.002, twell=0.001), point(16, 0.002, twell=0.0025)
    card = card_with(relu, bench(relu, *points), tmp_path)
    assert "weights in bf16" in card
    assert "on one NVIDIA H200 (twellctl 0.1.0, torch 2.11.0):" in card
    assert "| 1 | 500 | 1000 (union) | 2.00x | - | 2.13% |" in card
    assert "| 16 | 500 | 400 (union) | 0.80x | - | 2.13% |" in card
    assert NO_GAIN not in card


@pytest.mark.parametrize(
    ("took", "gains"), [({"twell": 0.00197}, False), ({"twell": 0.0019}, True)]
)
def test_a_model_that_is_no_faster_says_so(relu, tmp_path, took, gains):
    card = card_with(relu, bench(relu, point(1, 0.002, **took)), tmp_path)
    assert (NO_GAIN not in card) == gains


@pytest.mark.parametrize(("quantize", "gains"), [(None, True), ("fp8", False)])
def test_the_rival_is_dense_in_the_same_precision(relu, tmp_path, quantize, gains):
    found = bench(relu, point(1, 0.002, dense_FP8=0.001, twell=0.001), quantize=quantize)
    card = card_with(relu, found, tmp_path)
    assert f"weights in {'FP8' if quantize else 'bf16'}" in card
    assert "| 1 | 500 | 1000 (union) | 2.00x | 1.00x | 2.13% |" in card
    assert (NO_GAIN not in card) == gains


def test_what_bench_decode_writes_goes_into_the_card(cli, relu, text_file, tmp_path, monkeypatch):
    count_less(monkeypatch)
    file = tmp_path / "bench.json"
    words = ["--data", text_file, "--prompt-tokens", 8, "--new-tokens", 12, "--batch", 1]
    code, _, _ = cli("bench", "decode", relu, *words, "--device", "cpu", "--json", file)
    assert code == 0
    code, _, _ = cli("export", relu, tmp_path / "out", "--bench", file)
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
def test_what_is_no_bench_of_it_is_refused(cli, relu, tmp_path, change, sentence):
    found = bench(relu, point(1, 0.002, twell=0.001)) | change
    if "of another" in change:
        found["models"][0]["model"]["fingerprint"] = "0"
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(found))
    code, _, err = cli("export", relu, tmp_path / "out", "--bench", file)
    assert (code, len(err)) == (1, 1)
    assert sentence in err[0]
    assert not (tmp_path / "out").exists()


def test_others_text_means_nothing(relu, tmp_path):
    found = bench(relu, point(1, 0.002), without="<b>none</b>")
    card = card_with(relu, found | {"device": "[x](y)"}, tmp_path)
    assert "[x](y)" not in card
    assert "<b>" not in card
    assert "TwELL was not run there." in card
