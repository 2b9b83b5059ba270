"""Dense products of few rows: PyTorch's or our own."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from played_kernels import H200, gated, linear
from torch import Tensor

from twellctl.bundle.twell_fp8 import Fp8Weight, fp8_linear, round_weight
from twellctl.bundle.twell_weights import FFN
from twellctl.decoding import few_ways
from twellctl.decoding.few_ways import DENSE, OWN_PRODUCTS

M, N, K = OWN_PRODUCTS, 256, 128


@pytest.fixture
def taken(monkeypatch) -> list[str]:
    """The names of our own kernels that ran, and of PyTorch's products over e4m3."""
    made = []

    def noted(name: str, run):
        return lambda *given, **how: (made.append(name), run(*given, **how))[1]

    def not_rounded(x: Tensor, weight: Fp8Weight) -> Tensor:
        """Inputs stay as they are, so that results are those of the kernels."""
        return fp8_linear(x, weight, round_inputs=False)

    def products(x: Tensor):
        return noted("fp8_products", partial(not_rounded, x))

    def e4m3_gated(kernels, limits, x: Tensor, ffn: FFN, **how) -> Tensor:
        return gated(kernels, limits, x, bf16_of(ffn) if ffn.s_gate is not None else ffn, **how)

    def e4m3_linear(kernels, limits, x, weight, bias=None, *, scale=None, **how) -> Tensor:
        weight = weight if scale is None else weight.float() * scale[:, None]
        return linear(kernels, limits, x, weight, bias, **how)

    monkeypatch.setattr(few_ways, "few_gated", noted("few_gated", e4m3_gated))
    monkeypatch.setattr(few_ways, "few_linear", noted("few_linear", e4m3_linear))
    monkeypatch.setattr(few_ways, "fp8_linear", noted("fp8_linear", not_rounded))
    monkeypatch.setattr(few_ways, "fp8_products", products)
    return made


def bf16_of(ffn: FFN) -> FFN:
    """The same weights, not rounded any more; W_down by rows of neurons."""
    gate, up = (w.float() * s[:, None] for w, s in ((ffn.w_gate, ffn.s_gate), (ffn.w_up, ffn.s_up)))
    down = ffn.w_down.float() * ffn.s_down
    return FFN(gate, up, down, ffn.b_gate, ffn.b_up, ffn.b_down)


def own_ffn(x: Tensor, ffn: FFN, counts: Tensor | None) -> Tensor:
    hidden = gated(None, None, x, ffn, overlap=True, counts=counts)
    y = hidden @ ffn.w_down
    return y if ffn.b_down is None else y + ffn.b_down


def onto(residual: Tensor | None, y: Tensor) -> Tensor:
    return y if residual is None else residual + y


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-2)  # of sums up to thousands


def drawn(fp8: bool, bias: bool) -> FFN:
    torch.manual_seed(3)
    weights = [torch.randn(size) for size in ((N, K), (N, K), (K, N))]
    biases = [torch.randn(size) if bias else None for size in (N, N, K)]
    if not fp8:
        return FFN(*weights[:2], weights[2].t().contiguous(), *biases)
    values, scales = zip(*map(round_weight, weights), strict=True)
    return FFN(*values[:2], values[2].t(), *biases, *(scale.flatten() for scale in scales))


OF_TORCH = ["fp8_products", "fp8_products", "fp8_linear"]
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
    wanted = own_ffn(x, bf16_of(ffn) if fp8 else ffn, of_gate := torch.ones(rows))
    by_columns = replace(ffn, w_down=ffn.w_down.t().contiguous().t())
    found = DENSE.run(None, H200, x, by_columns, residual=before, counts=counts)
    assert taken == ran
    assert torch.equal(counts, of_gate)
    close(found, onto(before, wanted))


@pytest.mark.parametrize("rows", [M, M + 1])
def test_the_dense_ffn_with_w_down_by_rows_of_neurons(taken, rows):
    ffn, x, before = drawn(False, True), torch.randn(rows, K), torch.randn(rows, K)
    found = DENSE.run(None, H200, x, ffn, residual=before)
    assert taken == (["few_gated"] if rows == M else [])
    close(found, before + own_ffn(x, ffn, None))


@pytest.mark.parametrize(
    ("fp8", "rows", "ran"),
    [
        (False, M, ["few_linear"]),
        (False, M + 1, []),
        (True, M, ["few_linear"]),
        (True, M + 1, ["fp8_linear"]),
    ],
)
def test_a_linear_layer(taken, fp8, rows, ran):
    ffn, x, before = drawn(fp8, True), torch.randn(rows, K), torch.randn(rows, N)
    found = few_ways.linear(
        None, H200, x, ffn.w_gate, ffn.b_gate, scale=ffn.s_gate, residual=before, overlap=True
    )
    assert taken == ran
    weight = bf16_of(ffn).w_gate if fp8 else ffn.w_gate
    close(found, before + x @ weight.t() + ffn.b_gate)
