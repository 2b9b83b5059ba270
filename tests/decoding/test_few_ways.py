"""Dense products of few rows: PyTorch's or our own."""

from dataclasses import replace

import pytest
import torch
from played_kernels import H200, gated, linear
from torch import Tensor

from twellctl.bundle.twell_fp8 import round_weight
from twellctl.bundle.twell_weights import FFN
from twellctl.decoding import few_ways
from twellctl.decoding.few_ways import BY_COLUMNS, IN_PLACE, OWN_PRODUCTS

M, N, K = OWN_PRODUCTS, 256, 128


@pytest.fixture
def taken(monkeypatch) -> list[str]:
    """What ran: the names of our own kernels, and of what stands in for PyTorch's over e4m3."""
    made = []

    def noted(name: str, run):
        return lambda *given, **how: (made.append(name), run(*given, **how))[1]

    def dense_e4m3_linear(kernels, x: Tensor, weight, residual: Tensor | None) -> Tensor:
        y = x @ (weight.values.float() * weight.scale).t()
        return onto(residual, y if weight.bias is None else y + weight.bias)

    def dense_e4m3_ffn(kernels, limits, x: Tensor, ffn: FFN, *, residual, counts) -> Tensor:
        return onto(residual, own_ffn(x, bf16_of(ffn), counts))

    def e4m3_gated(kernels, limits, x: Tensor, ffn: FFN, **how) -> Tensor:
        if ffn.s_gate is not None:  # whose W_down lies by columns here, and is not read
            ffn = bf16_of(replace(ffn, w_down=ffn.w_down.t()))
        return gated(kernels, limits, x, ffn, **how)

    def e4m3_linear(kernels, limits, x, weight, bias=None, *, scale=None, **how) -> Tensor:
        weight = weight if scale is None else weight.float() * scale[:, None]
        return linear(kernels, limits, x, weight, bias, **how)

    monkeypatch.setattr(few_ways, "few_gated", noted("few_gated", e4m3_gated))
    monkeypatch.setattr(few_ways, "few_linear", noted("few_linear", e4m3_linear))
    monkeypatch.setattr(few_ways, "dense_e4m3_linear", noted("linear", dense_e4m3_linear))
    monkeypatch.setattr(few_ways, "dense_e4m3_ffn", noted("ffn", dense_e4m3_ffn))
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
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


def drawn(fp8: bool, bias: bool) -> FFN:
    torch.manual_seed(3)
    weights = [torch.randn(size) for size in ((N, K), (N, K), (K, N))]
    biases = [torch.randn(size) if bias else None for size in (N, N, K)]
    if not fp8:
        return FFN(*weights[:2], weights[2].t().contiguous(), *biases)
    values, scales = zip(*map(round_weight, weights), strict=True)
    return FFN(*values[:2], values[2].t(), *biases, *(scale.flatten() for scale in scales))


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("fp8", "hopper", "rows", "ran"),
    [
        (False, False, M, ["few_gated", "few_linear"]), (False, False, M + 1, []),
        (True, True, M, ["few_gated", "few_linear"]), (True, True, M + 1, ["ffn"]),
        (True, False, M + 1, ["few_gated", "few_linear"]),
    ],
)  # fmt: skip
def test_the_ffn_by_columns(taken, monkeypatch, fp8, hopper, rows, ran, bias, residual):
    monkeypatch.setattr(few_ways, "takes_hopper_kernels", lambda index: hopper)
    ffn, x = drawn(fp8, bias), torch.randn(rows, K)
    before, counts = (torch.randn(rows, K) if residual else None), torch.ones(rows)
    wanted = own_ffn(x, bf16_of(ffn) if fp8 else ffn, of_gate := torch.ones(rows))
    by_columns = replace(ffn, w_down=ffn.w_down.t().contiguous())
    found = BY_COLUMNS.run(None, H200, x, by_columns, residual=before, counts=counts)
    assert taken == ran
    assert torch.equal(counts, of_gate)
    close(found, onto(before, wanted))


@pytest.mark.parametrize("rows", [M, M + 1])
def test_the_ffn_with_w_down_as_it_lies(taken, rows):
    ffn, x, before = drawn(False, True), torch.randn(rows, K), torch.randn(rows, K)
    found = IN_PLACE.run(None, H200, x, ffn, residual=before)
    assert taken == (["few_gated"] if rows == M else [])
    close(found, before + own_ffn(x, ffn, None))


@pytest.mark.parametrize(
    ("fp8", "hopper", "rows", "ran"),
    [
        (False, False, M, ["few_linear"]), (False, False, M + 1, []),
        (True, True, M, ["few_linear"]), (True, True, M + 1, ["linear"]),
        (True, False, M + 1, ["few_linear"]),
    ],
)  # fmt: skip
def test_a_linear_layer(taken, monkeypatch, fp8, hopper, rows, ran):
    monkeypatch.setattr(few_ways, "takes_hopper_kernels", lambda index: hopper)
    ffn, x, before = drawn(fp8, True), torch.randn(rows, K), torch.randn(rows, N)
    found = few_ways.linear(
        None, H200, x, ffn.w_gate, ffn.b_gate, scale=ffn.s_gate, residual=before, overlap=True
    )
    assert taken == ran
    weight = bf16_of(ffn).w_gate if fp8 else ffn.w_gate
    close(found, before + x @ weight.t() + ffn.b_gate)
