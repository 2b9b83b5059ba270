"""bench decode with dense FP8 as a rival, and of models in FP8."""

import json

import pytest
import torch
from small_benches import NO_FP8, TINY_STEPS, BothForms, relative
from torch import nn

from twellctl.bench import decode_runs, device
from twellctl.bench.decode import bench_decode
from twellctl.bench.settings import DecodeSettings
from twellctl.bench.subject import in_precisions, is_in_fp8
from twellctl.bundle.twell_rounded_linear import RoundedLinear
from twellctl.export import export
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import load_model, shared_copy
from twellctl.models.quantised import round_model
from twellctl.models.schemes import SCHEMES
from twellctl.profile import profile

CPU = torch.device("cpu")


@pytest.fixture
def has_fp8(monkeypatch):
    """As if this device were one with FP8 products; torch's run on the CPU, too."""
    monkeypatch.setattr(device, "why_no_products", lambda *asked: None)


# ---- whole models ----


@pytest.fixture(scope="module")
def fp8_export(relu_llama, text_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp8") / "export"
    measured = profile(relu_llama, [str(text_file)], windows=4, seq_len=32)
    export(relu_llama, folder, profile=measured, quantize="fp8")
    return folder


def test_what_is_expanded_is_rounded_to_the_same_again(fp8_export):
    fp8 = load_model(open_checkpoint(fp8_export), dtype=torch.bfloat16, device=CPU)
    models = in_precisions(fp8, None)
    assert models.benched is models.fp8 is fp8
    assert not any(isinstance(module, RoundedLinear) for module in models.bf16.modules())
    assert models.bf16.lm_head.weight.data_ptr() == fp8.lm_head.weight.data_ptr()
    again = shared_copy(models.bf16)
    round_model(again, SCHEMES["fp8"])
    layers = [name for name, module in fp8.named_modules() if isinstance(module, RoundedLinear)]
    assert len(layers) == 14
    for name in layers:
        stored, expanded, found = (m.get_submodule(name) for m in (fp8, models.bf16, again))
        assert (type(expanded), expanded.weight.dtype) == (nn.Linear, torch.bfloat16)
        assert torch.equal(found.weight.float(), stored.weight.float())
        # of a row's largest number only eight bits are left
        torch.testing.assert_close(found.weight_scale, stored.weight_scale, rtol=2**-7, atol=0)
        exact = stored.weight.double() * stored.weight_scale.double()
        assert ((expanded.weight.double() - exact).abs() <= 2**-8 * exact.abs()).all()


def test_a_bf16_model_stays_what_it_is_unless_it_is_to_be_quantised(relu_llama):
    model = load_model(open_checkpoint(relu_llama), dtype=torch.bfloat16, device=CPU)
    model.requires_grad_(False)
    models = in_precisions(model, None)
    assert (models.bf16, models.fp8, models.benched) == (model, None, model)
    assert models.called == "this model"
    weight = model.model.layers[0].mlp.up_proj.weight.clone()
    models = in_precisions(model, "fp8")
    assert isinstance(models.benched.model.layers[0].mlp.up_proj, RoundedLinear)
    assert models.called == "this model in FP8"
    rounded = models.bf16.model.layers[0].mlp.up_proj.weight
    assert 0 < relative(rounded, weight) < 0.04


def test_bench_model_refuses_an_fp8_export(cli, fp8_export, text_file):
    code, _, err = cli("bench", "model", fp8_export, "--data", text_file, "--device", "cpu")
    assert code == 1
    assert "is quantised already (FP8): take the model that it was exported from" in err[-1]


# ---- token by token ----


def test_bench_decode_runs_a_bf16_model_densely_in_fp8(has_fp8, both_forms, count_less):
    found = bench_decode(DecodeSettings(**TINY_STEPS))
    assert found.wrong == []
    (model,) = found.to_json()["models"]
    for point in model["points"]:
        assert (list(point["forms"]), point["skipped"]) == (["dense", "dense FP8", "twell"], {})
        dense, fp8, twell = point["forms"].values()
        assert (fp8["over_fp8"], dense["over_dense"]) == (1, 1)
        assert twell["over_fp8"] == pytest.approx(fp8["ms"] / twell["ms"])
        assert 0.4 * dense["floor_bytes"] < fp8["floor_bytes"] < 0.9 * dense["floor_bytes"]
    (said,) = found.sentences
    assert said.startswith("on this CPU this model (random, 2 layers, ")
    assert "x as fast as dense FP8 at batch 1 (" in said


def test_dense_fp8_is_left_out_where_it_is_not_wanted(has_fp8, both_forms, count_less):
    found = bench_decode(DecodeSettings(**TINY_STEPS | {"dense_fp8": False, "batches": (1,)}))
    (point,) = found.models[0].points
    assert ([form.name for form in point.forms], point.skipped) == (["dense", "twell"], {})


def test_bench_decode_over_fp8_weights(cli, has_fp8, both_forms, count_less, monkeypatch):
    made = []

    def kept(model, quantize):
        made.append(in_precisions(model, quantize))
        return made[-1]

    monkeypatch.setattr("twellctl.bench.subject.in_precisions", kept)
    found = bench_decode(DecodeSettings(**TINY_STEPS, quantize="fp8"))
    assert found.wrong == []
    (models,) = made
    (model,) = found.models
    for point in model.points:
        dense, fp8, twell = point.forms
        assert [f.name for f in point.forms] == ["dense", "dense FP8", "twell FP8"]
        assert [f.in_fp8 for f in point.forms] == [False, True, True]
        assert twell.floor_bytes < fp8.floor_bytes < dense.floor_bytes
        assert twell.density == pytest.approx(0.02, rel=0.3)
    assert models.fp8 is not None  # both forms ran over these weights, none was rounded for one
    assert model.what.startswith("this model in FP8 (random, 2 layers, ")


def test_a_rival_that_fails_is_left_out(has_fp8, both_forms, count_less, monkeypatch):
    class NoFp8(BothForms):
        @staticmethod
        def why_not(model):
            return "no such layer" if is_in_fp8(model) else None

    monkeypatch.setattr(decode_runs, "KernelDecoder", NoFp8)
    found = bench_decode(DecodeSettings(**TINY_STEPS | {"batches": (1,)}))
    (point,) = found.models[0].points
    assert [form.name for form in point.forms] == ["dense", "twell"]
    assert point.skipped == {"dense FP8": "no such layer"}
    assert "dense FP8" not in found.sentences[0]
    assert found.to_json()["models"][0]["points"][0]["forms"]["twell"]["over_fp8"] is None


def test_without_kernels_an_fp8_export_decodes_in_bf16(success, count_less, fp8_export, text_file):
    words = ("--data", text_file, "--prompt-tokens", "16", "--new-tokens", "15", "--batch", "1")
    out, _ = success("bench", "decode", fp8_export, *words, "--device", "cpu", "--json", "-")
    found = json.loads(out)
    (point,) = found["models"][0]["points"]
    assert (list(point["forms"]), point["skipped"]) == (["dense"], {})
    (said,) = found["sentences"]
    assert said.startswith("on this CPU this model in FP8 (")
    assert said.endswith("TwELL and dense FP8 were not run: the decode kernels need an NVIDIA GPU")


def test_where_dense_fp8_is_left_out(both_forms, count_less):
    found = bench_decode(DecodeSettings(**TINY_STEPS | {"batches": (1,)}))
    (point,) = found.models[0].points
    assert point.skipped == {"dense FP8": NO_FP8}
