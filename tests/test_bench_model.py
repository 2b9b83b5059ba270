"""bench model on the CPU: a random body and a real folder, both tiny."""

import json
from types import SimpleNamespace

import pytest
import torch
from shapes import TINY_CONFIG

from twellctl.bench import twell_side
from twellctl.bench.model import bench_model, last_hidden
from twellctl.bench.random_model import make_model, open_shape
from twellctl.bench.settings import ModelSettings
from twellctl.bench.twell_side import twell_twin, ways_taken
from twellctl.bundle.twell_model import TwellFFN, gated_ffns
from twellctl.errors import TwellError, UsageError
from twellctl.export import export
from twellctl.models.loading import MASKLESS, without_mask
from twellctl.profile import profile

TINY = {
    "tokens": (256, 16),
    "seq_len": 256,
    "config": TINY_CONFIG,
    "density": 0.02,
    "rounds": 1,
    "device": "cpu",
}


pytestmark = pytest.mark.usefixtures("count_less")


@pytest.fixture(scope="module")
def body():
    generator = torch.Generator().manual_seed(0)
    shape = open_shape(TINY_CONFIG, 3, context=64)
    return make_model(shape, 0.1, dtype=torch.float32, generator=generator).model


def test_the_twin_shares_its_weights_and_gives_the_same(body):
    numbers = {"tile": 256, "slots": (64,) * 3, "densities": (0.1,) * 3}
    twin = twell_twin(body, numbers, "auto")
    assert all(isinstance(ffn, TwellFFN) for ffn in gated_ffns(twin))
    assert not any(isinstance(ffn, TwellFFN) for ffn in gated_ffns(body))
    for ours, theirs in zip(twin.parameters(), body.parameters(), strict=True):
        assert ours.data_ptr() == theirs.data_ptr()
    ids = torch.randint(300, (2, 32))
    with torch.no_grad():
        torch.testing.assert_close(last_hidden(twin, ids), last_hidden(body, ids))


def test_leaving_the_mask_out_changes_nothing(body):
    ids = torch.randint(300, (2, 32))
    with torch.no_grad():
        body.set_attn_implementation("sdpa")
        masked = last_hidden(body, ids)
        without_mask(body, 32)
        assert body.config._attn_implementation == MASKLESS
        torch.testing.assert_close(last_hidden(body, ids), masked)


def test_a_sliding_window_keeps_its_mask(make_model):
    from transformers import AutoModel

    model = AutoModel.from_pretrained(make_model("mistral", sliding_window=8))
    without_mask(model, 16)
    assert model.config._attn_implementation == "sdpa"
    without_mask(model, 8)
    assert model.config._attn_implementation == MASKLESS


def test_a_random_model_is_measured():
    found = bench_model(ModelSettings(**TINY)).to_json()
    assert found["model"]["layers"] == 2
    assert [(p["tokens"], p["batch"], p["seq_len"]) for p in found["points"]] == [
        (256, 1, 256),
        (16, 1, 16),
    ]
    for point in found["points"]:
        assert list(point["candidates"]) == ["dense eager", "twell plain eager"]
        assert point["density_first_layer"] == pytest.approx(0.02, rel=0.1)
        assert [layer["slots"] % 8 for layer in point["layers"]] == [0, 0]
        assert point["reference"] == "float32"
        assert all(0 < c["error"] < 0.02 for c in point["candidates"].values())
    (said,) = found["sentences"]
    assert said.startswith("on this CPU this model (random, 2 layers) is ")


def test_an_export_is_measured_with_its_own_numbers(success, relu_llama, text_file, tmp_path):
    measured = profile(relu_llama, [str(text_file)], windows=4, seq_len=32)
    export(relu_llama, tmp_path / "export", profile=measured)
    words = ("--data", text_file, "--tokens", "64", "--seq-len", "32", "--rounds", "1")
    words += ("--device", "cpu")
    out, _ = success("bench", "model", tmp_path / "export", *words, "--json", "-")
    found = json.loads(out)
    (point,) = found["points"]
    assert [layer["slots"] for layer in point["layers"]] == [s.slots for s in measured.layers]
    assert point["density"] == pytest.approx(measured.density, rel=0.3)
    assert (point["batch"], point["seq_len"]) == (2, 32)
    assert found["sentences"][0].startswith("on this CPU this model is ")
    out, _ = success("bench", "model", tmp_path / "export", *words)
    assert "first layer" in out


def test_bad_calls_are_refused(relu_llama, text_file, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("def f(): pass")
    for settings, sentence in [
        ({"model": str(relu_llama)}, "give --data FILE with it, or neither"),
        ({"data": (str(text_file),)}, "give --data FILE with it, or neither"),
        ({"tokens": (300,)}, r"tokens must be a multiple of seq-len \(256\), or less: got 300"),
        ({"seq_len": 0}, "seq-len must be >= 1, got 0"),
        ({"tokens": (4096,), "seq_len": 4096}, "seq-len must be at most 2048, the context"),
        ({"density": 0.0}, "density must be > 0"),
        ({"rounds": 0}, "rounds must be >= 1"),
    ]:
        with pytest.raises(UsageError, match=sentence):
            bench_model(ModelSettings(**TINY | settings))
    real = TINY | {"config": None, "data": (str(text_file),), "tokens": (64,), "seq_len": 32}
    with pytest.raises(UsageError, match="seq-len must be at most 256, the context, got 512"):
        bench_model(ModelSettings(**real | {"model": str(relu_llama), "seq_len": 512}))
    texts = {"data": (str(short),), "model": str(relu_llama)}
    with pytest.raises(TwellError, match="less than one window of 32"):
        bench_model(ModelSettings(**real | texts))
    short.write_text("def f(): pass\n" * 6)
    with pytest.raises(TwellError, match=r"windows of 32 tokens, not 16384: give more text"):
        bench_model(ModelSettings(**real | texts | {"tokens": (2**19,)}))


def test_json_goes_to_a_file_and_tables_to_stdout(cli, success, tmp_path):
    file, other = tmp_path / "bench.json", tmp_path / "other.json"
    other.write_text('{"mine": 1}')
    words = ("bench", "model", "--config", TINY_CONFIG, "--tokens", "64", "--seq-len", "64")
    words += ("--density", "0.02", "--rounds", "1", "--device", "cpu", "--json")
    for _ in range(2):  # its own kind is replaced
        out, _ = success(*words, file)
        assert "64 tokens" in "".join(out)
        assert json.loads(file.read_text())["command"] == "bench model"
    code, out, err = cli(*words, other)
    assert (code, out) == (1, "")
    assert f"{other} exists and is no bench" in err[-1]
    assert other.read_text() == '{"mine": 1}'


def test_a_wrong_result_ends_in_an_error(cli, monkeypatch):
    monkeypatch.setattr(TwellFFN, "forward", lambda ffn, x: torch.zeros_like(x))
    words = ("--config", TINY_CONFIG, "--tokens", "64", "--seq-len", "64", "--density", "0.02")
    code, out, err = cli("bench", "model", *words, "--rounds", "1", "--device", "cpu")
    assert code == 1
    assert "on this CPU this model" in out
    assert "twell plain eager has a relative error of" in err[-1]


def test_which_way_auto_went(monkeypatch):
    """By the plans of layers that have one."""
    plans = ["1-64 union, 65+ dense"] * 2 + ["1-64 dense, 65+ lists", ""]
    ffns = [SimpleNamespace(twell_plan=plan) for plan in plans]
    monkeypatch.setattr(twell_side, "gated_ffns", lambda twin: ffns)
    assert ways_taken(None, 10000) == {"dense": 2, "lists": 1}
    assert ways_taken(None, 50) == {"union": 2, "dense": 1}
