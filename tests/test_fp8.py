"""The judge of FP8: what is rounded how, against float64; the layers that hold such weights."""

import pytest
import torch
from torch import Tensor, nn

from twellctl.bundle.twell_dense import gated_ffn, linear
from twellctl.bundle.twell_e4m3 import DTYPE, round_rows, round_weight
from twellctl.bundle.twell_rounded_linear import RoundedLinear, put_rounded_layers
from twellctl.bundle.twell_weights import FFN, Weight

# every finite e4m3 number, in float64
NUMBERS = torch.arange(256, dtype=torch.uint8).view(DTYPE).double()
NUMBERS = NUMBERS[NUMBERS.isfinite()].unique()
SHAPES = [(1, 64, 16), (3, 65, 17), (70, 256, 300), (5, 1, 1)]  # M, K, N


def spread(*shape: int, seed: int, decades: float = 2.0) -> Tensor:
    """Random numbers whose rows differ by some decades, and so do the numbers of a row."""
    made = torch.Generator().manual_seed(seed)
    rows = 10 ** (decades * torch.randn(shape[0], 1, generator=made))
    return torch.randn(shape, generator=made) * rows * torch.rand(shape, generator=made) ** 3


def weight_of(N: int, K: int, *, seed: int, bias: bool = False) -> Weight:
    drawn = torch.randn(N, generator=torch.Generator().manual_seed(seed)) if bias else None
    return Weight("e4m3", *round_weight(spread(N, K, seed=seed, decades=0.3)), drawn)


def exactly(weight: Weight) -> Tensor:
    return weight.values.double() * weight.scales.double()


def assert_near(found: Tensor, wanted: Tensor, terms: Tensor) -> None:
    """`found` errs by its own rounding, and by that of float32 sums whose terms' sizes add up."""
    last_bit = torch.finfo(found.dtype).eps * wanted.abs()
    error = (found.double() - wanted).abs()
    most = last_bit + 1e-5 * terms + torch.finfo(torch.float32).tiny
    assert (error <= most).all(), f"{(error / most).max()} of what it may"


@pytest.mark.parametrize("rounded", [round_rows, round_weight])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_number_is_rounded_to_the_nearest(rounded, dtype):
    x = spread(40, 200, seed=1, decades=6).to(dtype)
    values, scale = rounded(x)
    assert (values.dtype, scale.dtype, scale.shape) == (DTYPE, torch.float32, (40, 1))
    wanted = x.double() / scale.double()
    nearest = (wanted[..., None] - NUMBERS).abs().amin(-1)
    error = (wanted - values.double()).abs()
    assert (error <= nearest * (1 + 1e-6) + 1e-6 * wanted.abs()).all()
    assert (values.float().abs().amax(-1) == 448).all()


def test_scales_of_weights_are_numbers_of_bf16():
    _, scale = round_weight(spread(100, 30, seed=2))
    assert torch.equal(scale, scale.bfloat16().float())


@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-38, 1e38, torch.finfo(torch.float32).max])
def test_rows_of_any_size_are_held(largest):
    x = torch.tensor([[largest, -largest / 2, 0.0]])
    for rounded in (round_rows, round_weight):
        values, scale = rounded(x)
        assert scale.isfinite().all()
        assert (scale > 0).all()
        assert (values.double() * scale.double() - x).abs().max() <= max(largest * 2**-4, 1e-41)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_gives_nan_and_others_stay(bad):
    x = spread(4, 32, seed=3)
    weight = weight_of(6, 32, seed=4)
    wanted = linear(x, weight)
    x[1, 7] = bad
    found = linear(x, weight)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2, 3]], wanted[[0, 2, 3]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("round_inputs", [True, False], ids=["e4m3 inputs", "inputs as they are"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_linear_layer_against_float64(shape, round_inputs, bias, dtype):
    M, K, N = shape
    x, weight = spread(M, K, seed=5, decades=1).to(dtype), weight_of(N, K, seed=6, bias=bias)
    values, scale = round_rows(x)
    read = values.double() * scale.double() if round_inputs else x.double()
    wanted = read @ exactly(weight).T
    terms = read.abs() @ exactly(weight).abs().T
    if bias:
        wanted, terms = wanted + weight.bias, terms + weight.bias.abs()
    found = linear(x, weight, round_inputs=round_inputs)
    assert (found.dtype, found.shape) == (dtype, (M, N))
    assert_near(found, wanted, terms)


@pytest.mark.parametrize("round_inputs", [True, False], ids=["e4m3 inputs", "inputs as they are"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_gated_ffn_is_its_three_layers(shape, round_inputs):
    M, K, N = shape
    x = spread(M, K, seed=7, decades=0.2).bfloat16()
    gate, up = (weight_of(N, K, seed=seed, bias=True) for seed in (8, 9))
    down = weight_of(K, N, seed=10)
    how = {"round_inputs": round_inputs}
    hidden = linear(x, gate, **how).relu() * linear(x, up, **how)
    wanted = linear(hidden, down, **how)
    assert torch.equal(gated_ffn(x.view(1, M, K), FFN(gate, up, down), **how), wanted.view(1, M, K))


def test_quantising_costs_what_eight_bits_do():
    """3 bits of mantissa: a number errs by 2.6 % in the mean square, a long sum by no more."""
    made = torch.Generator().manual_seed(11)
    x, w = (torch.randn(size, 512, generator=made) for size in (64, 96))
    wanted = x.double() @ w.double().T
    weight = Weight("e4m3", *round_weight(w))
    errors = {
        round_inputs: float((linear(x, weight, round_inputs=round_inputs) - wanted).std())
        for round_inputs in (True, False)
    }
    size = float(wanted.std())
    assert 0.02 < errors[False] / size < 0.03
    assert 1.3 < errors[True] / errors[False] < 1.5  # two of them, independent


def test_no_rows_and_any_strides():
    weight = weight_of(16, 32, seed=12)
    assert linear(torch.empty(0, 32), weight).shape == (0, 16)
    x = spread(32, 5, seed=13)
    assert torch.equal(linear(x.T, weight), linear(x.T.contiguous(), weight))


def test_autocast_changes_nothing():
    x, weight = spread(4, 32, seed=14), weight_of(6, 32, seed=15)
    wanted = linear(x, weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(linear(x, weight), wanted)


def fp8_layer(bias: bool = True) -> RoundedLinear:
    made = RoundedLinear("e4m3", 32, 6, bias)
    weight = weight_of(6, 32, seed=16, bias=bias)
    made.weight.data, made.weight_scale.data = weight.values, weight.scales
    if bias:
        made.bias.data = weight.bias
    return made


def test_layers_are_changed_but_for_those_that_stay():
    model = nn.ModuleDict(
        {"a": nn.Linear(8, 4, bias=False), "head": nn.Linear(4, 2), "n": nn.ReLU()}
    )
    put_rounded_layers(model, "e4m3", ["head"])
    assert [type(m).__name__ for m in model.children()] == ["RoundedLinear", "Linear", "ReLU"]
    assert {name: (p.dtype, tuple(p.shape)) for name, p in model["a"].named_parameters()} == {
        "weight": (DTYPE, (4, 8)),
        "weight_scale": (torch.float32, (4, 1)),
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_another_dtype_leaves_weights_and_scales_alone(dtype):
    layer = fp8_layer()
    was = {name: t.clone() for name, t in layer.state_dict().items()}
    layer.to(dtype)
    assert layer.bias.dtype == dtype
    for name in ("weight", "weight_scale"):
        now = layer.state_dict()[name]
        assert now.dtype == was[name].dtype
        assert torch.equal(now.float(), was[name].float())


def test_gradients_are_refused_and_not_lost():
    layer, x = fp8_layer(), torch.randn(3, 32, requires_grad=True)
    with pytest.raises(
        RuntimeError, match="quantised layers have no gradients: train the model that"
    ):
        layer(x)
    with torch.no_grad():
        assert layer(x).shape == (3, 6)


def test_compiled_it_is_one_graph_and_the_same():
    layer, x = fp8_layer(), torch.randn(3, 32)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), layer(x))
