"""Codes of 4 bits alone, emulated: weights that kernels expand are those of `expand`, to the bit,
and steps over codes say what the model says."""

import copy
from dataclasses import replace

import pytest
import torch
from attached import attached
from compiled import EVERY_CASE
from emulated_head import H200, DecoderKernels, read_by
from emulated_kernels import EmulatedKernels, needs_emulator
from packed_models import packed
from transformers import AutoConfig, AutoModelForCausalLM

from twellctl.bundle.twell_int4 import expand
from twellctl.decoding import coded_decoder, kernel_fit
from twellctl.decoding.coded_decoder import CodedDecoder
from twellctl.decoding.coded_linear import expand_layers
from twellctl.decoding.decoder import Wanted
from twellctl.decoding.step_int4 import by_quads, down_by_neurons, expand_neurons, expand_quads
from twellctl.decoding.torch_decoder import TorchDecoder, padded

WIDE = {"hidden_size": 1536, "num_attention_heads": 12, "vocab_size": 254, "hidden_act": "relu"}
WIDE |= {"intermediate_size": 256, "num_hidden_layers": 1, "num_key_value_heads": 2}
WIDE |= {"max_position_embeddings": 128, "initializer_range": 0.03}
pytestmark = needs_emulator
SIZES = [(36, 1536, 64, 64), (8, 2048, 128, 64), (20, 3584, 128, 128)]  # N, K, groups: stored, laid


def drawn(N: int, K: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All codes, and scales of all sizes."""
    generator = torch.Generator().manual_seed(N)
    codes = torch.randint(-8, 8, (N, K), dtype=torch.int8, generator=generator)
    sizes = torch.randint(-20, 20, (N, K // group), generator=generator)
    return codes, (torch.randn(N, K // group, generator=generator) * 2.0**sizes).bfloat16()


def check_rows(kernels: EmulatedKernels, N: int, K: int, stored: int, group: int) -> None:
    codes, scales = drawn(N, K, stored)
    made = expand_quads(kernels, by_quads(codes, scales, group), K, group)
    assert torch.equal(made, expand(codes, scales))


def check_down(kernels: EmulatedKernels, N: int, stored: int, group: int) -> None:
    codes, scales = drawn(768, N, stored)
    made = expand_neurons(kernels, *down_by_neurons(codes, scales, group), group)
    assert torch.equal(made.t(), expand(codes, scales))


@pytest.mark.parametrize(("N", "K", "stored", "group"), SIZES)
def test_rows_by_quads(N, K, stored, group):
    check_rows(EmulatedKernels(), N, K, stored, group)


@pytest.mark.parametrize(("N", "stored", "group"), [(640, 64, 64), (256, 128, 64), (384, 128, 128)])
def test_down_by_neurons(N, stored, group):
    check_down(EmulatedKernels(), N, stored, group)


@pytest.mark.skipif(
    not EVERY_CASE, reason="takes long, and tests/gpu runs it: TWELL_TEST_EVERY_CASE"
)
@torch.inference_mode()
def test_a_decoder_over_codes_alone(monkeypatch):
    """Its step says what the model's own forward says over weights that are expanded."""
    kernels = DecoderKernels()
    for module in (coded_decoder, kernel_fit):
        monkeypatch.setattr(module, "kernels_for", lambda sources, index: kernels)
        monkeypatch.setattr(module, "device_limits", lambda index: replace(H200, num_sms=96))
    monkeypatch.setattr(kernel_fit, "takes_hopper_kernels", lambda index: True)
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen2", **WIDE)
    model = packed(AutoModelForCausalLM.from_config(config).eval().bfloat16())
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.bias"):
            parameter.normal_()
    expand_layers(beside := copy.deepcopy(model))
    decoder, judge = attached(CodedDecoder(model), 3), attached(TorchDecoder(beside), 3)
    kernels.beside = [*read_by(decoder._steps["one kernel"]._layers)]
    prompt = padded([([5, 8, 13], 0, [1])])
    (found, counts), (known, fired) = decoder.run(*prompt), judge.run(*prompt)
    assert (found - known).abs().max() < 0.05 * known.std()
    assert (counts - fired).abs().max() <= 5
    given = padded([([7], 3, [1])])
    known, fired = judge.run(*given)
    for wanted in Wanted if EVERY_CASE else [Wanted.EXACT]:  # others: test_emulated_head
        logits, counts = decoder.run(*given, wanted=wanted)
        assert logits.shape == known.shape == (1, 1, 254)
        assert (logits - known).abs().max() < 0.05 * known.std()
        assert (counts - fired).abs().max() <= 5  # gates near to 0
