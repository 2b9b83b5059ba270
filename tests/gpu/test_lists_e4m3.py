"""The kernels of many tokens over e4m3 weights by themselves, in float64.

The lists, and the layout of sums and rounds, are those of test_up_down.py.
"""

import numpy as np
import pytest
import torch
from list_builder import Lists, build_lists, from_bf16, to_bf16
from list_launches import DOWN_STAGES, run_down, run_hidden, run_up
from list_reference import Shape
from on_gpu import HOPPER
from torch import Tensor

from twellctl.bundle.twell_e4m3 import quantise_hidden, quantise_inputs, quantise_rows, scale_sums
from twellctl.bundle.twell_format import fires, keep_fired
from twellctl.bundle.twell_fp8 import E4M3, LARGEST, Fp8Weight, round_rows, round_weight
from twellctl.bundle.twell_launch import device_limits
from twellctl.bundle.twell_weights import FFN

pytestmark = HOPPER
DEVICE = "cuda"  # the emulator has another (test_emulated_e4m3.py)
NAN, INF = 0x7E00, 0x7C00  # of f16
# kind of gate, shape, K: ragged tiles and groups, several groups a warp and panels, one token,
# empty, full
CASES = [
    ("usual", Shape(70, 264, 64, 64, 32, 264), 256),
    ("usual", Shape(150, 264, 64, 64, 32, 136), 128),
    ("usual", Shape(1, 5632, 64, 64, 8, 5632), 512),
    ("usual", Shape(3000, 5632, 64, 240, 896, 5632), 1024),
    ("skewed", Shape(333, 2056, 256, 88, 128, 2056), 384),
    ("skewed", Shape(333, 2056, 256, 88, 128, 520), 384),
    ("none", Shape(9, 256, 64, 64, 8, 256), 128),
    ("some rows", Shape(257, 768, 256, 768, 120, 384), 128),
    ("one class", Shape(120, 2048, 64, 96, 64, 2048), 128),
    ("all", Shape(9, 72, 256, 72, 8, 72), 128),
    ("all", Shape(19, 1032, 256, 1032, 16, 344), 256),
]
ROWS = [(1, 128), (70, 384), (1000, 2048), (33, 4096)]


def limits():
    return device_limits(0)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_e4m3(*shape: int, seed: int) -> Tensor:
    """Of all sizes, with subnormal numbers and zeros."""
    numbers = drawn(*shape, seed=seed) * 4 ** drawn(*shape, seed=seed + 1)
    return numbers.clamp(-LARGEST, LARGEST).to(E4M3)


def random_scales(num: int, seed: int) -> np.ndarray:
    return np.float32(10 ** np.random.default_rng(seed).uniform(-3, 1, num))


def random_token_scales(num: int, seed: int) -> np.ndarray:
    """float32 [num, 2]: scales and powers of two."""
    powers = 2.0 ** np.random.default_rng(seed).integers(-9, 9, num)
    return np.stack((random_scales(num, seed + 1), powers), 1).astype(np.float32)


def some_ffn(N: int, K: int, *, bias: bool) -> FFN:
    """Weights that `quantise_rows` looks at, and their biases."""
    gate, up = (round_weight(drawn(N, K, seed=seed) / K**0.5) for seed in (5, 6))
    biases = [drawn(N, seed=seed).bfloat16().to(DEVICE) if bias else None for seed in (7, 8)]
    scales = [scale.flatten().to(DEVICE) for _, scale in (gate, up)]
    values = [values.to(DEVICE) for values, _ in (gate, up)]
    return FFN(*values, values[0], *biases, None, *scales, None)


@pytest.mark.parametrize(("M", "K"), ROWS)
@pytest.mark.parametrize("bias", [False, True])
def test_rows_are_rounded_as_the_judge_does(kernels, M, K, bias):
    x = (drawn(M, K, seed=1) * 10 ** (20 * (2 * torch.rand(M, 1) - 1))).bfloat16()
    x[M // 2] = 0
    ffn = some_ffn(264, K, bias=bias)
    found, token_scales = (t.cpu() for t in quantise_rows(kernels, limits(), x.to(DEVICE), ffn))
    values, scale = round_rows(x)
    assert torch.equal(token_scales[:, :1], scale)
    assert torch.equal(found.view(torch.uint8), values.view(torch.uint8))
    # no h of theirs is too large for f16, and none so small that f16 would lose it
    mantissa, _ = torch.frexp(token_scales[:, 1])
    assert (mantissa == 0.5).all()
    wanted = values.double() * scale.double()
    products = []
    for weight, of_rows, added in (
        (ffn.w_gate, ffn.s_gate, ffn.b_gate),
        (ffn.w_up, ffn.s_up, ffn.b_up),
    ):
        exact = (weight.cpu().double() * of_rows.cpu().double()[:, None]).t()
        products.append(wanted @ exact + (0 if added is None else added.cpu().double()))
    hidden = (products[0] * products[1]).abs()
    inside = hidden.amax(1) < torch.finfo(torch.float32).max
    divided = hidden.amax(1) / token_scales[:, 1].double()
    assert (divided[inside] < 2.0**16).all()
    usual = inside & (hidden.amax(1) > 1e-30)
    assert (divided[usual] > 2.0**-6).all()


@pytest.mark.parametrize(("M", "K"), [*ROWS, (5, 640), (3, 8192)])
def test_rows_for_a_walk_are_rounded_as_the_judge_does(kernels, M, K):
    x = (drawn(M, K, seed=1) * 10 ** (20 * (2 * torch.rand(M, 1) - 1))).bfloat16()
    x[M // 2] = 0
    found = quantise_inputs(kernels, x.to(DEVICE))
    values, scale = round_rows(x)
    assert torch.equal(found.values.cpu().view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(found.scales.cpu(), scale)
    assert torch.equal(found.token_scales.cpu(), torch.cat((scale, torch.ones(M, 1)), 1))
    assert (found.one.item(), found.heavy_count.item()) == (1, 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_has_no_finite_product(kernels, bad):
    x = drawn(5, 256, seed=2).bfloat16()
    x[3, 77] = bad
    ffn = some_ffn(72, 256, bias=False)
    short = quantise_inputs(kernels, x.to(DEVICE))
    rows = quantise_rows(kernels, limits(), x.to(DEVICE), ffn)
    ones = torch.ones_like(x)
    hidden = [quantise_hidden(kernels, *(t.to(DEVICE) for t in two)) for two in product_of(x, ones)]
    for values, token_scales in (rows, (short.values, short.token_scales), *hidden):
        products = values.cpu().float() * token_scales.cpu()[:, :1]
        assert not (products.sum(1)).isfinite()[3]
        assert products[[0, 1, 2, 4]].isfinite().all()


def product_of(x: Tensor, ones: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Gates and ups: what is not finite is a gate that fires, an up of one that does, and does not.

    That one gives NaN, too: 0 times infinity.
    """
    return [(x.abs(), ones), (ones, x), (-ones, x)]


@pytest.mark.parametrize(
    ("M", "N"), [(1, 8), (70, 264), (33, 5632), (5, 4104), (9, 14336), (2, 16392), (2, 28672)]
)
def test_hidden_rows_are_rounded_as_the_judge_does(kernels, M, N):
    """Rows of any size, of zeros of either sign, of nothing that fires; up to where h overflows."""
    sizes = 10 ** (15 * (2 * torch.rand(2, M, 1) - 1))
    gate, up = ((drawn(M, N, seed=seed) * size).bfloat16() for seed, size in enumerate(sizes))
    gate[:, 1::7], gate[:, 2::7], up[:, 3::7] = 0.0, -0.0, -0.0
    gate[M // 2] = -gate[M // 2].abs()
    if M > 8:
        gate[0], up[0] = 1e20, 3e17 * up[0].sign()
        gate[1, 5] = -torch.inf
        gate[2], up[2] = 2.0**-66, 2.0**-66 * up[2].sign()  # h below the smallest normal number
    counts = torch.arange(M, dtype=torch.int32, device=DEVICE)
    given = gate.to(DEVICE), up.to(DEVICE)
    found, scales = (t.cpu() for t in quantise_hidden(kernels, *given, counts=counts))
    values, wanted = round_rows(keep_fired(gate) * up)
    assert torch.equal(scales, wanted)
    assert torch.equal(found.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(counts.cpu(), torch.arange(M) + fires(gate).sum(1))
    again = quantise_hidden(kernels, *given)
    assert torch.equal(again[0].cpu().view(torch.uint8), values.view(torch.uint8))


def bare(M: int, N: int, seed: int, bias: bool) -> tuple[Tensor, Fp8Weight, Tensor]:
    """Sums of e4m3 numbers, of weights with such scales and biases, and of x with such scales."""
    sums = (400 * drawn(M, N, seed=seed)).bfloat16()
    scale = 10 ** drawn(N, 1, seed=seed + 1)
    added = drawn(N, seed=seed + 2).bfloat16() if bias else None
    none = torch.empty(N, 0, dtype=E4M3)
    return sums, Fp8Weight(none, scale, added), 10 ** (4 * drawn(M, 1, seed=seed + 3))


def with_scales(sums: Tensor, weight: Fp8Weight, scales: Tensor) -> Tensor:
    y = sums.float() * weight.scale.t() * scales
    return (y if weight.bias is None else y + weight.bias).bfloat16()


def there(weight: Fp8Weight) -> Fp8Weight:
    parts = (weight.values, weight.scale, weight.bias)
    return Fp8Weight(*(None if part is None else part.to(DEVICE) for part in parts))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("M", "N"), [(1, 8), (70, 264), (9, 14336), (2, 28672)])
def test_hidden_rows_of_bare_sums(kernels, M, N, bias):
    """As of products that have their scales, but where a sum of a bias is rounded once or twice."""
    gate, w_gate, scales = bare(M, N, 11, bias)
    up, w_up, _ = bare(M, N, 21, bias)
    gate[:, 1::7], up[:, 3::7] = 0.0, -0.0
    both = torch.cat((gate, up), 1).to(DEVICE)
    counts = torch.zeros(M, dtype=torch.int32, device=DEVICE)
    lacks = scales.to(DEVICE), there(w_gate), there(w_up)
    found = quantise_hidden(kernels, *both.chunk(2, 1), lacks, counts)
    values, scale = (t.cpu() for t in found)
    gate, up = with_scales(gate, w_gate, scales), with_scales(up, w_up, scales)
    wanted, of_rows = round_rows(keep_fired(gate) * up)
    assert (counts.cpu() - fires(gate).sum(1)).abs().max() <= (1 if bias else 0)
    if not bias:
        assert torch.equal(scale, of_rows)
        assert torch.equal(values.view(torch.uint8), wanted.view(torch.uint8))
    torch.testing.assert_close(scale, of_rows, rtol=2**-6, atol=0)
    unlike = values.view(torch.uint8) != wanted.view(torch.uint8)
    assert unlike.float().mean() < 0.02


@pytest.mark.parametrize("more", [False, True], ids=["", "bias and residual"])
@pytest.mark.parametrize(("M", "N"), [(1, 16), (70, 4096), (3, 5632)])
def test_scaled_sums(kernels, M, N, more):
    sums, weight, scales = bare(M, N, 31, more)
    before = drawn(M, N, seed=36).bfloat16() if more else None
    given = sums.to(DEVICE), scales.to(DEVICE), there(weight)
    found = scale_sums(kernels, *given, None if before is None else before.to(DEVICE)).cpu()
    wanted = with_scales(sums, weight, scales)
    if not more:
        assert torch.equal(found, wanted)
        return
    exact = sums.double() * weight.scale.t().double() * scales.double()
    parts = exact.abs() + weight.bias.double().abs() + before.double().abs()
    exact += weight.bias.double() + before.double()
    assert ((found.double() - exact).abs() <= 2**-7 * parts).all()


@pytest.mark.parametrize(("kind", "shape", "K"), CASES, ids=str)
@pytest.mark.parametrize(("slabs_per_range", "neuron_ranges"), [(99, 1), (2, 1), (1, 4)])
@pytest.mark.parametrize("slabs", [1, 2])
def test_up_gives_partial_products(kernels, kind, shape, K, slabs_per_range, neuron_ranges, slabs):
    if slabs * shape.tile_tokens * 128 > limits().smem_bytes:
        pytest.skip("too large a tile for this device's shared memory")
    lists = build_lists(shape, kind, 2)
    x, w_up = random_e4m3(shape.M, K, seed=3), random_e4m3(shape.N, K, seed=5)
    per_range = min(slabs_per_range, K // 128)
    ranges = per_range, neuron_ranges
    partial = run_up(kernels, DEVICE, lists, x, w_up, ranges, slabs, "e4m3")
    found = partial.cpu().numpy()[:, lists.place]
    for q, of_range in enumerate(found):
        part = slice(q * per_range * 128, (q + 1) * per_range * 128)
        rows, columns = x.double().numpy()[lists.token, part], w_up.double().numpy()
        terms = rows * columns[lists.column, part]
        # tensor cores round each sum of 16 products towards 0
        most = 2.0**-22 * (1 + terms.shape[1] / 16) * np.abs(terms).sum(1)
        assert (np.abs(of_range - terms.sum(1)) <= most).all()


@pytest.mark.parametrize(("kind", "shape", "K"), CASES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("ranges", "grid", "room"),
    [(1, (1000, 1), 0), (3, (7, 3), 0), (9, (40, 2), 0), (1, None, 5000), (7, None, 64)],
)
def test_hidden_fills_the_rounds(kernels, kind, shape, K, has_bias, ranges, grid, room):
    rng = np.random.default_rng(3)
    lists = build_lists(shape, kind, 4)
    places = shape.num_tiles * shape.tile_tokens * shape.cap
    # eighths: every sum is exact
    partial = (rng.integers(-64, 64, (ranges, places)) / 8).astype(np.float32)
    bias = to_bf16(rng.integers(-64, 64, shape.N) / 8) if has_bias else None
    tokens, neurons = random_token_scales(shape.M, 5), random_scales(shape.N, 7)
    given = kernels, DEVICE, lists, partial, bias, grid, room
    found, _ = run_hidden(*given, "e4m3", (tokens, neurons))
    up = partial[:, lists.place].sum(0) * neurons[lists.column] * tokens[lists.token, 0]
    up = up + (from_bf16(bias)[lists.column] if has_bias else np.float32(0))
    hidden = from_bf16(lists.gate) * from_bf16(to_bf16(up)) / tokens[lists.token, 1]
    wanted = lists.rounds.reshape(-1).copy()
    with np.errstate(over="ignore"):  # of gates and scales at random
        wanted[lists.dest] = hidden.astype(np.float16).view(np.uint16)
    # the compiler may add the bias in the same step as it scales
    close = np.abs(found.astype(int) - wanted)[lists.dest] <= (16 if has_bias else 0)
    assert close.all()
    found[lists.dest] = wanted[lists.dest]
    np.testing.assert_array_equal(found, wanted)


def f16_rounds(lists: Lists) -> tuple[np.ndarray, np.ndarray]:
    """The rounds with h in f16, the gates' numbers; and h as float64 [M, N]."""
    rounds, shape = lists.rounds.copy(), lists.shape
    hidden = from_bf16(lists.gate).astype(np.float16)
    rounds.reshape(-1)[lists.dest] = hidden.view(np.uint16)
    dense = np.zeros((shape.M, shape.N))
    dense[lists.token, lists.column] = hidden
    return rounds, dense


@pytest.mark.parametrize(("kind", "shape", "K"), CASES, ids=str)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("has_bias", [False, True])
def test_down_gives_y(kernels, kind, shape, K, splits, has_bias):
    if shape.panel_rows * 32 + DOWN_STAGES > limits().smem_bytes:
        pytest.skip("too large a panel for this device's shared memory")
    lists, w_down = build_lists(shape, kind, 6), random_e4m3(shape.N, K, seed=7)
    bias = to_bf16(np.random.default_rng(8).standard_normal(K)) if has_bias else None
    tokens, columns = random_token_scales(shape.M, 9), random_scales(K, 11)
    rounds, hidden = f16_rounds(lists)
    scales = tokens[:, 1:].astype(float) * columns
    wanted = hidden @ w_down.double().numpy() * scales
    terms = hidden @ w_down.double().abs().numpy() * scales
    wanted += from_bf16(bias) if has_bias else 0
    given = kernels, DEVICE, lists, rounds, w_down, bias, splits, "e4m3", (tokens, columns)
    found, again = run_down(*given), run_down(*given)
    np.testing.assert_array_equal(found, again, "differs from run to run")
    assert (np.abs(found - wanted) <= 2.0**-8 * np.abs(wanted) + 2e-6 * terms).all()


@pytest.mark.parametrize("value", [NAN, INF])
def test_what_is_not_finite_stays_with_its_token(kernels, value):
    shape, K = Shape(700, 1408, 64, 64, 248, 1408), 128
    lists, w_down = build_lists(shape, "usual", 7), random_e4m3(1408, K, seed=8)
    odd = np.arange(len(lists.dest)) % 997 == 5
    rounds, _ = f16_rounds(lists)
    spoilt = rounds.copy()
    spoilt.reshape(-1)[lists.dest[odd]] = value
    rest = w_down, None, 1, "e4m3", (random_token_scales(700, 9), random_scales(K, 10))
    plain, found = (run_down(kernels, DEVICE, lists, given, *rest) for given in (rounds, spoilt))
    is_odd = np.isin(np.arange(shape.M), lists.token[odd])
    assert not np.isfinite(found[is_odd]).all(1).any()
    np.testing.assert_array_equal(found[~is_odd], plain[~is_odd])
