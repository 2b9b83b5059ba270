"""bench with dense FP8 as a rival, and of models in FP8."""

import json

import pytest
import torch
from shapes import TINY_CONFIG
from small_benches import NO_FP8, TINY_STEPS, BothForms, drawn, relative
from torch import nn

from twellctl.bench import decode_runs, dense_fp8
from twellctl.bench.contest import Contender, Course, hold
from twellctl.bench.decode import bench_decode
from twellctl.bench.dense_fp8 import SCHEMES, fast_product, rounded_copy, why_no_dense_fp8
from twellctl.bench.model import bench_model
from twellctl.bench.results import DENSE, DENSE_FP8, TWELL
from twellctl.bench.settings import DecodeSettings, ModelSettings
from twellctl.bench.subject import in_precisions, is_in_fp8
from twellctl.bundle import twell_e4m3
from twellctl.bundle.twell_e4m3 import DTYPE
from twellctl.bundle.twell_rounded_linear import RoundedLinear
from twellctl.bundle.twell_weights import Weight
from twellctl.export import export
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import load_model, shared_copy
from twellctl.models.quantised import round_model
from twellctl.profile import profile

CPU = torch.device("cpu")
RIVALS = ["dense FP8 row-wise eager", "dense FP8 tensor-wise eager"]


@pytest.fixture
def has_fp8(monkeypatch):
    """As if this device were one with FP8 products; torch's run on the CPU, too."""
    monkeypatch.setattr(dense_fp8, "why_no_products", lambda *asked: None)


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
    round_model(again)
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


TINY_BODY = {
    "tokens": (64,),
    "seq_len": 64,
    "config": TINY_CONFIG,
    "density": 0.02,
    "rounds": 1,
    "device": "cpu",
}


@pytest.mark.parametrize("quantize", [None, "fp8"], ids=["bf16", "FP8"])
def test_bench_model_times_the_body_in_fp8(has_fp8, count_less, quantize):
    found = bench_model(ModelSettings(**TINY_BODY, quantize=quantize))
    assert found.wrong == []
    found = found.to_json()
    (point,) = found["points"]
    twell = "twell FP8 plain eager" if quantize else "twell plain eager"
    assert list(point["candidates"]) == ["dense eager", *RIVALS, twell]
    errors = {name: c["error"] for name, c in point["candidates"].items()}
    assert errors["dense eager"] < 0.02
    assert all(0.005 < errors[name] < 0.1 for name in RIVALS)
    if quantize:
        # both compute the same rounded weights, the rival by sums that are not exact
        assert errors[twell] == pytest.approx(errors["dense FP8 row-wise eager"], rel=0.2)
    else:
        assert errors[twell] < 0.02
    assert point["density"] == pytest.approx(0.02, rel=0.15)
    assert point["fastest_fp8"] in RIVALS
    called = "this model in FP8" if quantize else "this model"
    (said,) = found["sentences"]
    assert said.startswith(f"on this CPU {called} (random, 2 layers) is ")
    assert " as fast as eager bf16 and " in said
    assert " as fast as dense FP8 (" in said


def test_bench_model_takes_an_fp8_export(success, fp8_export, text_file):
    words = ("--data", text_file, "--tokens", "64", "--seq-len", "32", "--rounds", "1")
    out, _ = success("bench", "model", fp8_export, *words, "--device", "cpu", "--json", "-")
    found = json.loads(out)
    (point,) = found["points"]
    assert list(point["candidates"]) == ["dense eager", "twell FP8 plain eager"]
    assert found["without_fp8"] == NO_FP8
    assert found["sentences"][0].startswith("on this CPU this model in FP8 is ")


def test_rivals_without_room_are_left_out(has_fp8, count_less, monkeypatch):
    monkeypatch.setattr("twellctl.bench.model.free_memory", lambda device: 4.4e9)
    found = bench_model(ModelSettings(**TINY_BODY)).to_json()
    said = "5 GB are needed, and 4 GB are free"
    assert found["without_fp8"] is None  # it needs next to nothing
    monkeypatch.setattr("twellctl.bench.model.WORKSPACE", 5 << 30)
    assert bench_model(ModelSettings(**TINY_BODY)).facts["without_fp8"] == said


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
    found = bench_model(ModelSettings(**TINY_BODY, dense_fp8=False))
    assert found.facts["without_fp8"] == "by --no-dense-fp8"


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


by_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)


# ---- the equation ----


@by_scheme
def test_each_scheme_rounds_to_e4m3_with_its_scales(scheme):
    x, weight = drawn(5, 64, seed=1), drawn(48, 64, seed=2)
    for tensor, rounded in ((x, scheme.of_inputs), (weight, scheme.of_weights)):
        values, scale = rounded(tensor)
        assert (values.dtype, values.shape, scale.dtype) == (DTYPE, tensor.shape, torch.float32)
        assert scale.shape == ((len(tensor), 1) if scheme.name == "row-wise" else (1, 1))
        assert values.float().abs().max() == 448
        assert relative(values.float() * scale, tensor) < 0.04  # 2^-4 at most for a number
    rows = (scheme.of_inputs(x)[0].float().abs().amax(-1) == 448).sum()
    assert rows == (5 if scheme.name == "row-wise" else 1)


@by_scheme
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", [(1, 64, 48), (5, 128, 16), (70, 256, 304)])
def test_torch_computes_the_equation(scheme, bias, shape):
    M, K, N = shape
    rounded = scheme.of_inputs(drawn(M, K, seed=3))
    weight = Weight("e4m3", *scheme.of_weights(drawn(N, K, seed=4)), drawn(1, N, seed=5)[0] * bias)
    wanted = (rounded[0].double() * rounded[1].double()) @ (
        weight.values.double() * weight.scale.double()
    ).t() + weight.bias.double()
    found = fast_product(*rounded, weight)
    assert (found.dtype, found.shape) == (torch.bfloat16, (M, N))
    assert relative(found, wanted) < 2**-7


@by_scheme
def test_a_body_is_rounded_and_its_other_weights_are_shared(scheme):
    torch.manual_seed(7)
    body = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 64, bias=False))
    body.bfloat16().requires_grad_(False)
    rounded = rounded_copy(body, scheme)
    assert isinstance(body[0], nn.Linear)
    assert rounded[1].weight.data_ptr() == body[1].weight.data_ptr()
    x = drawn(2, 64, seed=8).view(1, 2, 64)
    found = rounded(x)
    assert found.shape == (1, 2, 64)
    assert 0.01 < relative(found, body(x)) < 0.1


# ---- which rival counts ----


def test_where_it_is_left_out(monkeypatch):
    sizes = [(64, 32), (64, 32)]
    assert why_no_dense_fp8(CPU, torch.bfloat16, sizes) == NO_FP8
    gpu, old = torch.device("cuda", 0), torch.device("cuda", 1)
    capabilities = {0: (9, 0), 1: (8, 6)}

    class Limits:
        def __init__(self, index: int):
            self.capability = capabilities[index]

    monkeypatch.setattr(twell_e4m3, "device_limits", Limits)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert why_no_dense_fp8(gpu, torch.bfloat16, sizes) is None
    assert why_no_dense_fp8(old, torch.bfloat16, sizes) == NO_FP8
    assert why_no_dense_fp8(gpu, torch.float16, sizes) == "FP8 products give bf16, not float16"
    said = "FP8 products take sizes that are multiples of 16, not 24 and 64"
    assert why_no_dense_fp8(gpu, torch.bfloat16, [*sizes, (64, 24)]) == said


def test_a_wrong_rival_never_wins():
    x = torch.ones(80, 4)
    told: list[str] = []

    def rival(name: str, factor: float) -> Contender:
        return Contender(name, DENSE_FP8, lambda number: factor * x)

    contenders = [
        Contender("dense eager", DENSE, lambda number: x),
        rival("dense FP8 row-wise eager", 1.2),
        rival("dense FP8 tensor-wise eager", 2),
        Contender("twell", TWELL, lambda number: x),
    ]
    course = Course(CPU, 1, told.append, lambda done, total: None)
    outcome = hold(
        course, contenders, lambda y: {"error": float(y[0, 0]) - 1}, what="rows", tokens=80
    )
    names = ["dense eager", "dense FP8 row-wise eager", "twell"]
    assert [c.name for c in outcome.candidates] == names
    said = "its result is wrong: a relative error of 1"
    assert outcome.skipped == {"dense FP8 tensor-wise eager": said}
    assert told[-2] == f"dense FP8 tensor-wise eager is left out: {said}"
