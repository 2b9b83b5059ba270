"""Dense FP8 as bench has it: its equation, what a wrong rival gets, when it is left out."""

from dataclasses import replace

import pytest
import torch
from small_benches import drawn, relative
from torch import nn

from twellctl.bench.contest import Contender, Course, hold
from twellctl.bench.decode_forms import (
    few_weights,
    fp8_parts,
    rounded_weights,
)
from twellctl.bench.dense_fp8 import (
    SCHEMES,
    exact_product,
    exactly,
    fast_product,
    fp8_contenders,
    fp8_ffns,
    rounded_copy,
    why_no_dense_fp8,
)
from twellctl.bench.results import DENSE, DENSE_FP8, TWELL
from twellctl.bench.synthetic import EVEN, make_rows, make_weights
from twellctl.bench.twell_side import fp8_module, with_route
from twellctl.bundle import twell_fp8
from twellctl.bundle.twell_fp8 import E4M3, Fp8Weight, fp8_ffn

CPU = torch.device("cpu")
RIVALS = ["dense FP8 row-wise eager", "dense FP8 tensor-wise eager"]
NO_FP8 = "FP8 products need an NVIDIA GPU of compute capability 8.9 or newer"
by_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)


# ---- the equation ----


@by_scheme
def test_each_scheme_rounds_to_e4m3_with_its_scales(scheme):
    x, weight = drawn(5, 64, seed=1), drawn(48, 64, seed=2)
    for tensor, rounded in ((x, scheme.of_inputs), (weight, scheme.of_weights)):
        values, scale = rounded(tensor)
        assert (values.dtype, values.shape, scale.dtype) == (E4M3, tensor.shape, torch.float32)
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
    weight = Fp8Weight(*scheme.of_weights(drawn(N, K, seed=4)), drawn(1, N, seed=5)[0] * bias)
    wanted = (rounded[0].double() * rounded[1].double()) @ (
        weight.values.double() * weight.scale.double()
    ).t() + weight.bias.double()
    for product, most in ((exact_product, 2**-8), (fast_product, 2**-7)):
        found = product(*rounded, weight)
        assert (found.dtype, found.shape) == (torch.bfloat16, (M, N))
        assert relative(found, wanted) < most


@pytest.fixture(scope="module")
def problem():
    """Rows `[80, 128]` and an FFN of 256 neurons of which a fifth fires, with biases."""
    made = {"dtype": torch.bfloat16, "generator": torch.Generator().manual_seed(6)}
    weights = make_weights(128, 256, 0.2, bias=True, **made)
    return make_rows(80, 128, 0.2, EVEN, **made), weights


def test_the_ffns_are_judged_by_exact_sums_of_what_they_rounded(problem):
    x, weights = problem
    rows = torch.arange(0, 80, 3)
    contenders = fp8_contenders(fp8_ffns(["eager"]), x, rows, [weights, weights.copy()])
    assert [(c.name, c.kind) for c in contenders] == [(name, DENSE_FP8) for name in RIVALS]
    plain = [t if t is None else t.double() for t in weights.split]
    gate, up = x.double() @ plain[0].t() + plain[3], x.double() @ plain[1].t() + plain[4]
    wanted = (gate.relu() * up) @ plain[2].t() + plain[5]
    for contender, own in zip(contenders, (0.01, 0.06), strict=True):
        y = contender.call(0)
        assert torch.equal(y, contender.call(1))
        assert contender.own_error(y) < own  # tensor-wise h has another scale for fewer rows
        assert 0.01 < relative(y, wanted) < 0.15
        assert contender.own_error(y.roll(1, 0)) > 0.5
        assert not contender.own_error(torch.full_like(y, torch.nan)) <= 1


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
    with exactly(rounded):
        exact = rounded(x)
    assert torch.equal(rounded(x), found)
    assert found.shape == (1, 2, 64)
    assert relative(found, exact) < 0.05
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

    monkeypatch.setattr(twell_fp8, "device_limits", Limits)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert why_no_dense_fp8(gpu, torch.bfloat16, sizes) is None
    assert why_no_dense_fp8(old, torch.bfloat16, sizes) == NO_FP8
    assert why_no_dense_fp8(gpu, torch.float16, sizes) == "FP8 products give bf16, not float16"
    said = "FP8 products take sizes that are multiples of 16, not 24 and 64"
    assert why_no_dense_fp8(gpu, torch.bfloat16, [*sizes, (64, 24)]) == said


def test_a_wrong_rival_never_wins(problem):
    x, weights = problem
    told: list[str] = []
    right, spoilt = fp8_contenders(fp8_ffns(["eager"]), x, torch.arange(80), [weights])
    contenders = [
        Contender("dense eager", DENSE, lambda number: x),
        right,
        replace(spoilt, call=lambda number: 2 * spoilt.call(number)),
        Contender("twell", TWELL, lambda number: x),
    ]
    course = Course(CPU, 1, None, 0.0, told.append, lambda done, total: None)
    outcome = hold(course, contenders, lambda y: {"error": 0.0}, what="rows", tokens=80)
    names = ["dense eager", RIVALS[0], "twell"]
    assert [c.name for c in outcome.candidates] == names
    said = (
        "its result is wrong: a relative error of 1 against exact sums of the same rounded "
        "numbers, where 0.3 is explained"
    )
    assert outcome.skipped == {"dense FP8 tensor-wise eager": said}
    assert told[-2] == f"dense FP8 tensor-wise eager is left out: {said}"


def test_an_ffn_in_fp8_is_that_of_an_export(problem):
    x, weights = problem
    module = with_route(fp8_module(weights, 64, 0.2), "twell")
    assert (module.twell_slots, module.twell_density, module.twell_route) == (64, 0.2, "twell")
    assert (module.twell_tile, bool(module.twell_sources)) == (256, True)
    few = rounded_weights(few_weights(*weights.split))
    assert torch.equal(module(x), fp8_ffn(x, *fp8_parts(few)))
