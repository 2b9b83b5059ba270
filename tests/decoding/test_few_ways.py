"""Dense products of few rows: PyTorch's or our own."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from played_kernels import H200, gated, linear
from torch import Tensor, nn

from twellctl.bundle import twell_dense
from twellctl.bundle.twell_dense import rounded_weight
from twellctl.bundle.twell_weights import FFN, Weight, plain_weight
from twellctl.decoding import few_ways
from twellctl.decoding.few_ways import DENSE, OWN_PRODUCTS, with_activation

M, N, K = OWN_PRODUCTS, 256, 128


@pytest.fixture
def taken(monkeypatch) -> list[str]:
    """The names of our own kernels that ran, and of PyTorch's products over e4m3."""
    made = []

    def noted(name: str, run):
        return lambda *given, **how: (made.append(name), run(*given, **how))[1]

    rounded = twell_dense.ROUNDINGS["e4m3"]

    def not_rounded(x: Tensor, round_inputs: bool):
        """Inputs stay as they are, so that results are those of the kernels."""
        return noted("e4m3 product", rounded.products(x, False))

    def plain_gated(kernels, limits, x: Tensor, ffn: FFN, **how) -> Tensor:
        return gated(kernels, limits, x, plain_ffn(ffn), **how)

    def plain_linear(kernels, limits, x: Tensor, weight: Weight, **how) -> Tensor:
        return linear(kernels, limits, x, plain(weight), **how)

    monkeypatch.setattr(few_ways, "few_gated", noted("few_gated", plain_gated))
    monkeypatch.setattr(few_ways, "few_linear", noted("few_linear", plain_linear))
    fast = {"products": not_rounded, "why_no_products": lambda *asked: None}
    kept = {"e4m3": rounded._replace(**fast)}
    monkeypatch.setattr(twell_dense, "ROUNDINGS", kept)
    return made


def plain(weight: Weight) -> Weight:
    """The same weight, not rounded any more."""
    if not weight.is_rounded:
        return weight
    return plain_weight(weight.values.float() * weight.scales, weight.bias)


def plain_ffn(ffn: FFN) -> FFN:
    return FFN(*map(plain, ffn.weights))


def own_ffn(x: Tensor, ffn: FFN, counts: Tensor | None) -> Tensor:
    hidden = gated(None, None, x, ffn, overlap=True, counts=counts)
    y = hidden @ ffn.down.values.t()
    return y if ffn.down.bias is None else y + ffn.down.bias


def onto(residual: Tensor | None, y: Tensor) -> Tensor:
    return y if residual is None else residual + y


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-2)  # of sums up to thousands


def drawn(fp8: bool, bias: bool) -> FFN:
    torch.manual_seed(3)
    weights = [torch.randn(size) for size in ((N, K), (N, K), (K, N))]
    biases = [torch.randn(size) if bias else None for size in (N, N, K)]
    make = partial(rounded_weight, "e4m3") if fp8 else plain_weight
    return FFN(*map(make, weights, biases))


OF_TORCH = ["e4m3 product"] * 3
OURS = ["few_gated", "few_linear"]


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("fp8", "rows", "ran"),
    [(False, M, OURS), (False, M + 1, []), (True, M, OURS), (True, M + 1, OF_TORCH)],
)
def test_the_dense_ffn(taken, fp8, rows, ran, bias, residual):
    ffn, x = drawn(fp8, bias), torch.randn(rows, K)
    before, counts = (torch.randn(rows, K) if residual else None), torch.ones(rows)
    wanted = own_ffn(x, plain_ffn(ffn), of_gate := torch.ones(rows))
    found = DENSE.run(None, H200, x, ffn, residual=before, counts=counts)
    assert taken == ran
    assert torch.equal(counts, of_gate)
    close(found, onto(before, wanted))


@pytest.mark.parametrize("rows", [M, M + 1])
def test_the_dense_ffn_with_w_down_by_rows_of_neurons(taken, rows):
    ffn, x, before = drawn(False, True), torch.randn(rows, K), torch.randn(rows, K)
    down = replace(ffn.down, values=ffn.down.values.t().contiguous().t())
    ffn = replace(ffn, down=down)
    found = DENSE.run(None, H200, x, ffn, residual=before)
    assert taken == (["few_gated"] if rows == M else [])
    close(found, before + own_ffn(x, ffn, None))


@pytest.mark.parametrize(
    ("fp8", "rows", "ran"),
    [
        (False, M, ["few_linear"]),
        (False, M + 1, []),
        (True, M, ["few_linear"]),
        (True, M + 1, ["e4m3 product"]),
    ],
)
def test_a_linear_layer(taken, fp8, rows, ran):
    ffn, x, before = drawn(fp8, True), torch.randn(rows, K), torch.randn(rows, N)
    found = few_ways.linear(None, H200, x, ffn.gate, residual=before, overlap=True)
    assert taken == ran
    close(found, before + x @ plain(ffn.gate).values.t() + ffn.gate.bias)


@pytest.mark.parametrize(("act", "ran"), [(nn.SiLU(), OURS), (nn.GELU(), ["few_linear"] * 3)])
@pytest.mark.parametrize("rows", [M, M + 1])
def test_the_dense_ffn_with_another_activation(taken, act, ran, rows):
    ffn, x, before = drawn(False, True), torch.randn(rows, K), torch.randn(rows, K)
    way = with_activation(act, is_silu=isinstance(act, nn.SiLU))
    found = way.run(None, H200, x, ffn, residual=before)
    assert taken == (ran if rows == M else [])
    gate, up = (F.linear(x, one.values, one.bias) for one in (ffn.gate, ffn.up))
    close(found, before + F.linear(act(gate) * up, ffn.down.values, ffn.down.bias))
