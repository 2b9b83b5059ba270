"""Dense FP8 as bench has it: its equation, what a wrong rival gets, when it is left out."""

import pytest
import torch
from small_benches import drawn, relative
from torch import nn

from twellctl.bench.contest import Contender, Course, hold
from twellctl.bench.dense_fp8 import SCHEMES, fast_product, rounded_copy, why_no_dense_fp8
from twellctl.bench.results import DENSE, DENSE_FP8, TWELL
from twellctl.bundle import twell_fp8
from twellctl.bundle.twell_fp8 import E4M3, Fp8Weight

CPU = torch.device("cpu")
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

    monkeypatch.setattr(twell_fp8, "device_limits", Limits)
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
