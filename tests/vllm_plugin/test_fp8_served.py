"""FP8 exports in vLLM itself, built for CPUs, where its own FP8 linear layers run."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers_judge import FAMILIES, PROMPTS, assert_as_transformers, needs_vllm

pytestmark = needs_vllm
LAYERS = 2
NOISE = 0.1
DENSELY = "densely, by vLLM's own FP8 linear layers: the kernels need an NVIDIA GPU"


@pytest.fixture(scope="module")
def exports(make_export) -> dict[str, Path]:
    return {
        family: make_export(family, quantize="fp8", **changes)
        for family, changes in FAMILIES.items()
    }


def assert_logged(log: str, how: str, ranks: int = 1, models: int = 1) -> None:
    """Each rank said once of each model that its FFNs are those of the plugin, and `how`."""
    lines = re.findall(r"TwELL, rank (\d) of (\d): .*?: (.*)", log)
    assert len(lines) == ranks * models
    for rank, of, line in lines:
        assert int(rank) < int(of) == ranks
        assert line.startswith(f"{LAYERS} FFNs 128 x {320 // ranks} in FP8, of which")
        assert line.endswith(f"run {how}")


@pytest.mark.parametrize("played", [False, True])
def test_eager(exports, ask_vllm, played):
    """Every family; on a GPU that is played too, where the kernels read what vLLM holds."""
    settings = {"enforce_eager": True, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    answers, log = ask_vllm(*exports.values(), prompts=PROMPTS, played=played, **settings)
    assert_logged(log, "over played kernels" if played else DENSELY, models=len(exports))
    for folder, answer in zip(exports.values(), answers, strict=True):
        assert answer["calls"] >= 8 * LAYERS
        assert answer["calls"] % LAYERS == 0
        assert_as_transformers(folder, answer["rows"], noise=NOISE)


@pytest.mark.parametrize("played", [False, True])
def test_compiled(exports, ask_vllm, played):
    (answer,), log = ask_vllm(exports["qwen2"], prompts=PROMPTS, played=played)
    assert_logged(log, "over played kernels" if played else DENSELY)
    assert answer["calls"] >= 8 * LAYERS
    assert_as_transformers(exports["qwen2"], answer["rows"], noise=NOISE)


def test_two_ranks(exports, ask_vllm):
    """Compiled, and of a model with biases: one rank alone may add that of down."""
    (answer,), log = ask_vllm(exports["llama"], prompts=PROMPTS, tensor_parallel_size=2)
    assert_logged(log, DENSELY, ranks=2)
    assert_as_transformers(exports["llama"], answer["rows"], noise=NOISE)


def test_the_transformers_backend_says_that_it_runs_densely(exports, ask_vllm):
    settings = {"model_impl": "transformers", "enforce_eager": True}
    (answer,), log = ask_vllm(exports["llama"], prompts=PROMPTS, **settings)
    assert "densely, through vLLM's transformers backend" in log
    assert answer["calls"] == 0
    assert_as_transformers(exports["llama"], answer["rows"], noise=NOISE)


def stock_ffn():
    """Gate, up and down as vLLM holds them: 128 inputs, 384 neurons."""
    import torch
    from torch import nn

    def linear(N: int, K: int) -> nn.Module:
        made = nn.Module()
        made.weight = torch.randn(N, K).to(torch.float8_e4m3fn).t()
        made.weight_scale = torch.ones(N, 1)
        made.bias, made.tp_rank, made.quant_method = None, 0, None
        return made

    stock = nn.Module()
    stock.gate_up_proj, stock.down_proj = linear(2 * 384, 128), linear(128, 384)
    stock.down_proj.output_size, stock.down_proj.input_size_per_partition = 128, 384
    return stock


def test_weights_in_another_layout_are_not_read():
    """Packed for a kernel of vLLM's, of another dtype, or with a scale a tensor."""
    import torch

    from twellctl.vllm.fp8_ffn import TwellFp8FFN

    def ffn(**changes: torch.Tensor) -> TwellFp8FFN:
        stock = stock_ffn()
        for name, value in changes.items():
            setattr(stock.down_proj, name, value)
        return TwellFp8FFN(stock, 256, 64, 0.02, lambda device: True)

    assert ffn().why_not_read() is None
    as_stored = torch.zeros(384, 128, dtype=torch.float8_e4m3fn)
    for changes in (
        {"weight": as_stored},
        {"weight": as_stored.t()},
        {"weight": as_stored.view(torch.int32)},
        {"weight_scale": torch.ones(1)},
        {"weight_scale": None},
    ):
        assert "in a layout of its own" in ffn(**changes).why_not_read()


@pytest.mark.parametrize("key", [None, "of a token"])
def test_a_rounded_input_has_the_key_that_the_layer_wants(key):
    """Those on AMD's GPUs want one."""
    import torch
    from vllm.model_executor.kernels.linear import FP8ScaledMMLinearKernel

    from twellctl.bundle.twell_e4m3 import DTYPE, round_rows
    from twellctl.vllm.fp8_ffn import TwellFp8FFN

    class Kernel(FP8ScaledMMLinearKernel):
        is_supported = can_implement = classmethod(lambda *_: (True, None))
        fp8_dtype, config = DTYPE, SimpleNamespace(out_dtype=torch.bfloat16)
        layer_param_names = "weight", "weight_scale", "input_scale", "bound"
        quant_fp8 = staticmethod(lambda x, *_: round_rows(x))
        input_quant_key = staticmethod(lambda: key)
        __init__ = object.__init__

        def apply_scaled_mm(self, *, A, B, As, Bs, out_dtype, **_):
            return (A.float() @ B.float() * As * Bs.t()).to(out_dtype)

    def apply(layer, x, bias):
        return layer.scheme.fp8_linear.apply_weights(layer, x, bias)

    stock = stock_ffn()
    for linear in (stock.gate_up_proj, stock.down_proj):
        linear.scheme = SimpleNamespace(fp8_linear=Kernel())
        linear.quant_method = SimpleNamespace(apply=apply)
    ffn, x = TwellFp8FFN(stock, 256, 64, 0.02, lambda device: False), torch.randn(3, 128).bfloat16()
    values, scales = ffn.rounded(x)
    assert values.dtype == DTYPE
    assert torch.equal(ffn.compute(x, values, scales), ffn.compute(x, None, None))
