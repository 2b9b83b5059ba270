"""Which models and weights the kernel of a whole step takes, as the decoder chooses, on a CPU."""

import pytest
import torch
from attached import attached
from played_kernels import SIZES, Kernels, stand_in
from torch import nn

from twellctl.bench.random_model import round_to_int4
from twellctl.decoding import kernel_fit as module
from twellctl.decoding.kernel_decoder import KernelDecoder
from twellctl.models.quantised import round_model
from twellctl.models.schemes import SCHEMES


@pytest.fixture(autouse=True)
def kernels(monkeypatch) -> Kernels:
    return stand_in(monkeypatch)


def test_a_step_is_one_kernel_where_model_and_gpu_are_such(tiny, monkeypatch):
    wide = {"hidden_size": 2048, "head_dim": 64, "num_attention_heads": 32, "vocab_size": 512}
    takes = tiny("llama", **wide)
    assert module.why_not_one_kernel(takes) is None
    assert "a hidden size of 64" in module.why_not_one_kernel(tiny("llama", **SIZES))
    assert module.step_sizes(takes).entry("sparse") == "step_2048_64"
    rounded = tiny("llama", **wide)
    round_model(rounded, SCHEMES["fp8"])
    assert module.why_not_one_kernel(rounded) is None
    assert module.step_sizes(rounded).entry("sparse") == "step_2048_64_e4m3"
    mixed = tiny("llama", **wide)
    monkeypatch.setattr(
        module.families, "window_of", lambda model, i: 40 if model is mixed and i else None
    )
    assert "the same window and positions" in module.why_not_one_kernel(mixed)
    takes.lm_head.bias = nn.Parameter(torch.zeros(512))
    assert "no bias" in module.why_not_one_kernel(takes)
    monkeypatch.setattr(module, "takes_hopper_kernels", lambda index: False)
    takes.lm_head.bias = None
    assert "for Hopper" in module.why_not_one_kernel(takes)


WIDE = {"hidden_size": 1536, "head_dim": 128, "num_attention_heads": 12, "vocab_size": 512}
WIDE |= {"intermediate_size": 256, "num_hidden_layers": 1, "attention_bias": True}


@pytest.mark.parametrize("sparse", [True, False])
def test_a_step_over_the_codes_that_a_model_keeps(tiny, kernels, sparse):
    model = tiny("llama", **WIDE).bfloat16()
    round_to_int4(model)
    decoder = attached(KernelDecoder(model, sparse, gates="screened"), 3)
    assert decoder.step_kind == "int4"
    assert decoder.screens is None
    entries = {"step_1536_128_dense_int4", "refine"}
    assert {*kernels.prepared} == entries | ({"step_1536_128_int4"} if sparse else set())
    assert decoder.most_rough == 1
    (layer,) = decoder._in_int4
    assert layer.qkv.bias is decoder._layers[0].qkv.bias
    names = {"one kernel", "one dense kernel"} if sparse else {"one dense kernel"}
    assert names <= decoder.ways(1).keys()
    assert not names & decoder.ways(2).keys()
    stable = attached(KernelDecoder(model, sparse, stable=True), 3)
    assert (stable._in_int4, stable.step_kind, stable.most_rough) == (None, "bf16", 0)


def test_a_model_with_silu_goes_densely_in_one_kernel(tiny):
    model = tiny("llama", **WIDE, hidden_act="silu").bfloat16()
    assert module.why_not_one_kernel(model) is None
    assert "gates of ReLU" in module.why_not_screened(model)
    decoder = attached(KernelDecoder(model), 3)
    assert decoder.step_kind == "bf16"
    assert decoder.ways(1).keys() == {"one dense kernel", "dense"}
    assert "ReLU or SiLU" in module.why_not_one_kernel(tiny("llama", **WIDE, hidden_act="gelu"))
