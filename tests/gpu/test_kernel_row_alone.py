"""A row alone: each form of its step, one kernel or several, is as near to the model in float64 as
the kernels one by one."""

import copy

import pytest
import torch
from attached import attached
from kernel_models import (
    NUM_TOKENS,
    ONE_KERNEL,
    check_forms,
    check_written,
    dequantised,
    make,
    make_for_one_kernel,
    twice_each,
)

from twellctl.bench.decode_runs import timed_run
from twellctl.bench.random_model import round_to_int4
from twellctl.decoding.kernel_decoder import KernelDecoder
from twellctl.decoding.kernel_fit import why_not_one_kernel
from twellctl.decoding.opening import open_scheduler
from twellctl.models.quantised import round_model
from twellctl.models.schemes import SCHEMES

pytestmark = pytest.mark.gpu


def check_a_row_alone(judge, decoder, *, counted: bool) -> None:
    """Each form of a step of `decoder` is as near to the judge as the kernels one by one."""
    for length in (1, 5, 64, 130, 700, 2000):
        ids = torch.randint(1, 1000, (1, length + 1), device="cuda")
        table = torch.randperm(34, device="cuda").int()[None] + 1
        positions = torch.arange(length + 1, device="cuda").int()
        with torch.inference_mode():
            decoder.run(ids[:, :-1], positions[None, :-1], table, last=0)
            inputs = ids[:, -1:].int(), positions[None, -1:], table
            found = twice_each(decoder.ways(1), inputs)
            wanted = judge(ids).logits[0, -1:]
        check_forms(found, wanted, counted=counted)


@pytest.mark.parametrize("weights", ["bf16", "fp8", "int4"])
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("family", ONE_KERNEL)
def test_a_row_alone(family, sparse, weights):
    if weights != "bf16" and family == "heads of 256":
        pytest.skip("takes one kernel in bf16 alone")
    if weights == "fp8":
        model = make_for_one_kernel(family, 1408)
        round_model(model, SCHEMES["fp8"])
        judge = dequantised(model)
    else:
        model = make_for_one_kernel(family, 1408 if weights == "int4" else 1416)
        if weights == "int4":
            round_to_int4(model)
        judge = copy.deepcopy(model).double()
    assert KernelDecoder.why_not(model) is None
    assert why_not_one_kernel(model) is None
    decoder = attached(KernelDecoder(model, sparse, gates="screened"), 35)
    forms = decoder.ways(1)
    wanted = {"one dense kernel", "dense"}
    wanted |= {"one kernel", "union"} if sparse else set()
    wanted |= {"one screened kernel"} if sparse and weights == "bf16" else set()
    assert forms.keys() == wanted
    assert decoder.step_kind == ("e4m3" if weights == "fp8" else weights)
    check_a_row_alone(judge, decoder, counted=sparse)


@pytest.mark.parametrize("weights", ["bf16", "int4"])
@pytest.mark.parametrize("family", ["llama", "1536"])
def test_a_row_alone_with_silu(family, weights):
    settings = {"hidden_size": 2048, "initializer_range": 0.03, "intermediate_size": 1408}
    model = make(family, settings | ONE_KERNEL[family] | {"hidden_act": "silu"})
    if weights == "int4":
        round_to_int4(model)
    decoder = attached(KernelDecoder(model), 35)
    assert decoder.ways(1).keys() == {"one dense kernel", "dense"}
    assert decoder.step_kind == weights
    check_a_row_alone(copy.deepcopy(model).double(), decoder, counted=False)


@pytest.mark.parametrize("family", ["llama", "1536", "3584", "4096"])
def test_a_row_alone_over_fp8_weights_of_any_size(family):
    """Inputs of an FFN, and of o, of 1e-15 to 1e15; what is not finite stays so."""
    model = make_for_one_kernel(family, 1408)
    with torch.no_grad():
        for layer, size in zip(model.model.layers, (1e-15, 1.0, 1e15), strict=True):
            layer.post_attention_layernorm.weight *= size
            layer.mlp.down_proj.weight /= size**2
            layer.self_attn.v_proj.weight *= size
            layer.self_attn.o_proj.weight /= size
    round_model(model, SCHEMES["fp8"])
    judge, decoder = dequantised(model), attached(KernelDecoder(model), 3)
    tokens = torch.tensor([[7]], dtype=torch.int32, device="cuda")
    inputs = tokens, torch.zeros_like(tokens), tokens * 0 + 1
    with torch.inference_mode():
        found = twice_each(decoder.ways(1), inputs)
        check_forms(found, judge(tokens.long()).logits[:, 0], counted=True)
        for value in (torch.inf, torch.nan):
            model.get_input_embeddings().weight[7, 100] = value
            for name, form in decoder.ways(1).items():
                assert form(*inputs)[0].isnan().all(), (name, value)


@pytest.mark.parametrize("family", ONE_KERNEL)
def test_a_text_alone(family):
    model = make_for_one_kernel(family)
    judge = copy.deepcopy(model).double()
    prompts = [torch.randint(1, 1000, (length,)).tolist() for length in (5, 130)]
    scheduler = open_scheduler(
        model, decoder=KernelDecoder(model), max_running=2, cache_bytes=1 << 28
    )
    for prompt in prompts:
        (written,) = timed_run(scheduler, [prompt], NUM_TOKENS).tokens
        assert timed_run(scheduler, [prompt], NUM_TOKENS).tokens == [written]
        check_written(judge, model, prompt, written)
