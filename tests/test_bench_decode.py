"""bench decode on the CPU: what it runs of tiny models, and what it refuses."""

import gc
import json
import weakref

import pytest
import torch
from shapes import FAMILIES, TINY_CONFIG, write_config
from small_benches import NO_FP8, BothForms
from small_benches import TINY_STEPS as TINY

from twellctl.bench import decode_runs as runs
from twellctl.bench import subject as module
from twellctl.bench.decode import bench_decode
from twellctl.bench.random_model import make_model
from twellctl.bench.settings import DecodeSettings
from twellctl.decoding.lone_decoder import LoneDecoder
from twellctl.decoding.torch_decoder import TorchDecoder
from twellctl.errors import TwellError, UsageError
from twellctl.export import export
from twellctl.profile import profile

pytestmark = pytest.mark.usefixtures("count_less")

NO_GPU = "the decode kernels need an NVIDIA GPU"


def test_what_can_be_run_is_measured():
    found = bench_decode(DecodeSettings(**TINY)).to_json()
    (model,) = found["models"]
    assert model["without_twell"] == NO_GPU
    assert model["model"]["layers"] == 2
    assert [point["batch"] for point in model["points"]] == [1, 3]
    for point in model["points"]:
        assert list(point["forms"]) == ["dense"]
        assert point["skipped"] == {}
        for form in point["forms"].values():
            assert form["steps"] == 12
            assert form["ms_p10"] <= form["ms"] <= form["ms_p90"]
            rate = form["steps_per_second"]
            assert rate == pytest.approx(1000 / form["ms"])
            assert form["tokens_per_second"] == pytest.approx(point["batch"] * rate)
            assert form["density"] == pytest.approx(0.02, rel=0.5)
            assert 0 <= form["shortfall"] < 0.1
            assert form["of_floor"] == pytest.approx(rate / form["floor_steps_per_second"])
    (said,) = found["sentences"]
    assert said.startswith("on this CPU this model (random, 2 layers, ")
    assert said.endswith(f" in its dense form; TwELL and dense FP8 were not run: {NO_GPU}")
    json.dumps(found, allow_nan=False)


def test_twell_is_measured_against_the_dense_form(both_forms):
    found = bench_decode(DecodeSettings(**TINY | {"densities": (0.02, 0.1)}))
    assert found.wrong == []
    assert [model.described["density_asked"] for model in found.models] == [0.02, 0.1]
    for model in found.to_json()["models"]:
        assert model["without_twell"] is None
        one, three = model["points"]
        for point in (one, three):
            assert list(point["forms"]) == ["dense", "twell"]
            assert point["skipped"] == {"dense FP8": NO_FP8}
            twell, dense = point["forms"]["twell"], point["forms"]["dense"]
            assert twell["over_dense"] == pytest.approx(dense["ms"] / twell["ms"])
            assert dense["over_dense"] == 1
            assert dense["way"] is None
            assert twell["way"] == ("union" if point is three else "one kernel")
            assert twell["floor_bytes"] < dense["floor_bytes"]
            # the same tokens: float noise apart they fire alike
            assert twell["density"] == pytest.approx(dense["density"], rel=0.05)
        assert one["forms"]["twell"]["union"] == pytest.approx(one["forms"]["twell"]["density"])
        assert three["forms"]["twell"]["union"] > 2 * one["forms"]["twell"]["density"]
    said = found.sentences[0]
    assert "x as fast as dense bf16 at batch 1 (" in said
    assert "x at 3 (" in said


def test_a_model_in_4_bits_with_a_map(both_forms, monkeypatch):
    """The dense form is without the map. Steps in one kernel read codes, others what they are."""
    monkeypatch.setattr(BothForms, "step_kind", "int4", raising=False)
    found = bench_decode(DecodeSettings(**TINY | {"bits": 4, "map_rank": 128}))
    (model,) = found.to_json()["models"]
    assert model["model"]["intermediate_size"] == 256 + 128
    assert (model["model"]["bits"], model["model"]["map_rank"]) == (4, 128)
    one, three = (point["forms"] for point in model["points"])
    assert one["twell"]["density"] == pytest.approx(0.02, rel=0.6)  # of the others
    assert one["twell"]["floor_bytes"] < 0.8 * three["twell"]["floor_bytes"]


@pytest.mark.parametrize("family", ["gemma2", "phi3"])  # all: test_random_model.py
def test_the_shape_of_a_config_is_measured(success, family, tmp_path):
    words = ("--config", write_config(tmp_path, family), "--layers", 2)
    words += ("--prompt-tokens", 16, "--new-tokens", 15, "--batch", 2, "--density", 0.05)
    out, _ = success("bench", "decode", *words, "--device", "cpu", "--json", "-")
    (model,) = json.loads(out)["models"]
    kv_heads = FAMILIES[family].get("num_key_value_heads", 4)
    about = {"name": words[1], "type": family, "hidden_size": 128, "intermediate_size": 256}
    about |= {"layers": 2, "heads": 4, "kv_heads": kv_heads, "vocabulary": 2048}
    assert {key: model["model"][key] for key in about} == about
    assert model["model"]["density_asked"] == 0.05
    (point,) = model["points"]
    assert list(point["forms"]) == ["dense"]
    assert point["forms"]["dense"]["density"] == pytest.approx(0.05, rel=0.25)
    assert 0 <= point["forms"]["dense"]["shortfall"] < 0.1


def test_a_model_that_does_not_fit_is_refused_before_it_is_made(monkeypatch):
    """The engine may hold W_down a second time."""
    monkeypatch.setattr(module, "free_memory", lambda device: 5e9)
    said = r"Llama with 28 layers needs 8 GB, .* --layers \d or fewer"
    with pytest.raises(TwellError, match=said):
        bench_decode(DecodeSettings(**TINY | {"config": None}))


def test_one_model_is_gone_before_the_next_is_made(monkeypatch):
    made, alive = [], []

    def watched(*shape, **how):
        gc.collect()
        alive.append(sum(reference() is not None for reference in made))
        model = make_model(*shape, **how)
        made.append(weakref.ref(model))
        return model

    monkeypatch.setattr(module, "make_model", watched)
    short = {"batches": (1,), "densities": (0.02, 0.1)}
    bench_decode(DecodeSettings(**TINY | short))
    assert alive == [0, 0]


def test_a_form_that_chooses_other_tokens_is_reported(cli, both_forms, monkeypatch):
    class Wrong(BothForms):
        def __init__(self, model, sparse: bool = True, gates: str = "whole"):
            super().__init__(model)
            self._sparse = sparse

        def run(self, tokens, *inputs, **how):
            logits, fired = super().run(tokens, *inputs, **how)
            is_wrong = self._sparse and tokens.shape[1] == 1
            return logits.roll(1, -1) if is_wrong else logits, fired

    monkeypatch.setattr(runs, "KernelDecoder", Wrong)
    words = ("--config", TINY_CONFIG, "--prompt-tokens", 16, "--new-tokens", 15, "--batch", 2)
    words += ("--density", 0.02)
    code, out, err = cli("bench", "decode", *words, "--device", "cpu")
    assert code == 1
    assert "(union)" in out  # the way of its steps
    assert "twell chose a token" in err[-1]
    assert "standard deviations of the logits below the likeliest at batch 2" in err[-1]


def test_the_dense_form_may_not_fail(monkeypatch):
    def fail(*inputs, **settings):
        raise ValueError("no such cache\nat all")

    monkeypatch.setattr(TorchDecoder, "run", fail)
    with pytest.raises(TwellError, match="dense failed at batch 1: ValueError: no such cache"):
        bench_decode(DecodeSettings(**TINY))


def test_rows_that_are_alike_are_refused(monkeypatch):
    drawn = torch.randint

    def alike(high, size, **more):
        made = drawn(high, size, **more)
        return made[:1].expand(size).contiguous() if size[1] == 16 else made

    monkeypatch.setattr(torch, "randint", alike)
    with pytest.raises(TwellError, match=r"the 3 rows of a step fire only .*: so little is not"):
        bench_decode(DecodeSettings(**TINY))


def test_an_export_is_measured_on_real_prompts(success, relu_llama, text_file, tmp_path):
    measured = profile(relu_llama, [str(text_file)], windows=4, seq_len=32)
    export(relu_llama, tmp_path / "export", profile=measured)
    words = ("--data", text_file, "--prompt-tokens", "32", "--new-tokens", "20", "--batch", "2")
    words += ("--device", "cpu")
    out, _ = success("bench", "decode", tmp_path / "export", *words, "--json", "-")
    found = json.loads(out)
    assert found["command"] == "bench decode"
    assert found["bandwidth_gb_s"] > 0
    (point,) = found["models"][0]["points"]
    assert point["forms"]["dense"]["density"] == pytest.approx(measured.density, rel=0.3)
    assert found["sentences"][0].startswith("on this CPU this model (")
    out, _ = success("bench", "decode", tmp_path / "export", *words)
    assert "batch 2; medians of 16 steps; floor in steps/s" in out
    assert out.splitlines()[-1].endswith(NO_GPU)


def test_a_decoder_of_one_sequence_refuses_larger_batches(make_model, text_file, monkeypatch):
    monkeypatch.setattr(runs, "open_decoder", LoneDecoder)
    model = str(make_model("llama", hidden_act="relu"))
    settings = TINY | {"config": None, "model": model, "data": (str(text_file),)}
    assert bench_decode(DecodeSettings(**settings | {"batches": (1,)})).models[0].points
    with pytest.raises(UsageError, match=r"batch must be 1 to 1 for .*model, got 3"):
        bench_decode(DecodeSettings(**settings))


def test_bad_calls_are_refused(cli, relu_llama, silu_llama, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(TorchDecoder, "prefill_chunk", 16)  # a prompt is read alone
    short = tmp_path / "short.txt"
    short.write_text("def f(): pass\n" * 4)
    for settings, sentence in [
        ({"model": str(relu_llama)}, "give --data FILE with it, or neither"),
        ({"batches": (0,)}, "batch must be >= 1 and <= 64, got 0"),
        ({"batches": (1, 65)}, "batch must be >= 1 and <= 64, got 65"),
        ({"prompt_tokens": 0}, "prompt-tokens must be >= 1, got 0"),
        ({"new_tokens": 9}, "new-tokens must be >= 10, got 9"),
        ({"layers": 0}, "layers must be >= 1"),
        ({"new_tokens": 2500}, "must be at most 2048, the context, got 16 and 2500"),
        (
            {"model": str(relu_llama), "data": (str(text_file),)},
            "config is for a random model: leave out MODEL and --data, or --config",
        ),
        ({"densities": (0.0,)}, "density must be > 0"),
        ({"bits": 8}, "bits must be 4, got 8"),
        ({"bits": 4, "quantize": "fp8"}, "rounded to 4 bits or quantised: give --bits or"),
        ({"bits": 4, "map_rank": 100}, "map-rank must be a multiple of 128 with --bits, got 100"),
        (
            {"model": str(relu_llama), "data": (str(text_file),), "config": None, "bits": 4},
            "bits is for a random model: leave out MODEL and --data",
        ),
        (
            {"batches": (64,), "densities": (0.3,)},
            "new-tokens must be more for 64 rows, of 15 steps all went together in 0",
        ),
    ]:
        with pytest.raises(UsageError, match=sentence):
            bench_decode(DecodeSettings(**TINY | settings))
    real = TINY | {"config": None, "data": (str(text_file),)}
    with pytest.raises(TwellError, match="is a SiLU model"):
        bench_decode(DecodeSettings(**real | {"model": str(silu_llama)}))
    long = real | {"model": str(relu_llama), "new_tokens": 250}
    with pytest.raises(UsageError, match="must be at most 256, the context, got 16 and"):
        bench_decode(DecodeSettings(**long))
    little = real | {"data": (str(short),), "model": str(relu_llama), "batches": (64,)}
    said = "windows of 16 tokens, not 64: give more text, or a smaller --batch"
    with pytest.raises(TwellError, match=said):
        bench_decode(DecodeSettings(**little))


def test_without_a_gpu_only_the_cpu_is_tried(refusal, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for command in ("decode", "model"):
        said = refusal("bench", command)
        assert "torch finds none here (see twellctl doctor); --device cpu runs tiny" in said
