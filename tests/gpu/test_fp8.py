"""FP8 products on a GPU against the judge, which the CPU computes; an export of such weights."""

import pytest
import torch
from on_gpu import on_e4m3
from torch import Tensor

from twellctl.bundle.twell_cache import reasons_said
from twellctl.bundle.twell_dense import gated_ffn, linear, rounded_weight
from twellctl.bundle.twell_e4m3 import round_rows
from twellctl.bundle.twell_weights import FFN, Weight
from twellctl.convert import convert
from twellctl.export import export
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import load_model

pytestmark = pytest.mark.gpu
IDS = (torch.arange(34).view(2, 17) * 37) % 512


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight_of(N: int, K: int, *, seed: int, bias: bool = False) -> Weight:
    added = drawn(N, seed=seed).bfloat16() if bias else None
    return rounded_weight("e4m3", drawn(N, K, seed=seed) / K**0.5, added)


def on_gpu(weight: Weight) -> Weight:
    bias = None if weight.bias is None else weight.bias.cuda()
    return Weight("e4m3", weight.values.cuda(), weight.scales.cuda(), bias)


def test_rows_are_rounded_to_the_same_bits():
    x = drawn(200, 512, seed=1).bfloat16() * 10 ** drawn(200, 1, seed=2)
    (values, scale), (there, their_scale) = round_rows(x), round_rows(x.cuda())
    assert torch.equal(scale, their_scale.cpu())
    assert torch.equal(values.view(torch.uint8), there.cpu().view(torch.uint8))


@on_e4m3
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", [(1, 512, 64), (3, 64, 512), (65, 5632, 640), (70, 2048, 1520)])
def test_fp8_products_err_as_bf16_rounds(shape, bias):
    M, K, N = shape
    x, weight = drawn(M, K, seed=3).bfloat16(), weight_of(N, K, seed=4, bias=bias)
    wanted = linear(x.float(), weight)
    with reasons_said() as said:
        found = linear(x.cuda(), on_gpu(weight))
    assert (said, found.dtype) == ([], torch.bfloat16)
    error = (found.cpu().float() - wanted).abs()
    # accumulators of tensor cores hold some 14 bits
    assert error.max() < 2**-7 * wanted.abs().max()
    assert error.mean() < 2**-9 * max(1, K / 4096) * wanted.abs().mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [(64, 128), (30, 33)])
def test_an_ffn_is_the_same_where_the_products_do_not_run(dtype, sizes):
    K, N = sizes
    x = drawn(5, K, seed=5).to(dtype)
    gate, up, down = weight_of(N, K, seed=6), weight_of(N, K, seed=7), weight_of(K, N, seed=8)
    for round_inputs in (True, False):
        wanted = gated_ffn(x, FFN(gate, up, down), round_inputs=round_inputs).float()
        there = FFN(*map(on_gpu, (gate, up, down)))
        found = gated_ffn(x.cuda(), there, round_inputs=round_inputs).cpu().float()
        assert (found - wanted).abs().mean() < 0.02 * wanted.abs().mean()


@on_e4m3
@pytest.mark.parametrize("sizes", [(30, 64), (64, 30)])
def test_what_the_products_do_not_take_is_said_once(sizes):
    N, K = sizes
    x, weight = drawn(4, K, seed=9).bfloat16().cuda(), on_gpu(weight_of(N, K, seed=10))
    with reasons_said() as said:
        linear(x, weight)
        linear(x, weight)
    (reason,) = said
    assert f"FP8 products take sizes that are multiples of 16, not {K} and {N}" in reason


@torch.no_grad()
def test_an_export_computes_on_a_gpu_what_it_does_on_the_cpu(make_model, tmp_path):
    source = make_model("llama", hidden_size=64, intermediate_size=128, dtype=torch.bfloat16)
    convert(source, tmp_path / "relu")
    export(tmp_path / "relu", tmp_path / "out", quantize="fp8")
    checkpoint = open_checkpoint(tmp_path / "out")
    wanted, found, rounded = (
        load_model(checkpoint, dtype=dtype, device=torch.device(device))(IDS.to(device))
        .logits.float()
        .cpu()
        for dtype, device in (
            (torch.float32, "cpu"),
            (torch.bfloat16, "cuda"),
            (torch.bfloat16, "cpu"),
        )
    )
    assert (found - wanted).std() < 1.5 * (rounded - wanted).std()
