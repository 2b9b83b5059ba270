"""The head in 8 bits over int4 layers, emulated: the choice is that of the bf16 head."""

from dataclasses import replace

import pytest
import torch
from attached import attached
from compiled import EVERY_CASE
from emulated_head import (
    H200,
    Choice,
    DecoderKernels,
    HeadKernels,
    choice_of,
    near_ties,
    read_by,
)
from emulated_kernels import needs_emulator
from emulated_step import Done, Model, emulate
from transformers import AutoConfig, AutoModelForCausalLM

from twellctl.bench.random_model import round_to_int4
from twellctl.bundle.twell_few import few_linear
from twellctl.bundle.twell_weights import plain_weight
from twellctl.decoding import kernel_decoder, kernel_fit
from twellctl.decoding.decoder import Wanted
from twellctl.decoding.kernel_decoder import KernelDecoder
from twellctl.decoding.rough_head import Estimate, refine, rounded

pytestmark = needs_emulator
HEADS = {1536: (12, 96), 2048: (16, 128), 3072: (24, 98), 3584: (28, 113), 4096: (32, 132)}
LONG = 96 * 196 - 2  # more rows of a block than are added up at once, and than the ring holds
SIZES = [(1536, LONG), *((K, 1509) for K in HEADS)] if EVERY_CASE else [(1536, 1509)]
WIDE = {"hidden_size": 1536, "head_dim": 128, "num_attention_heads": 12, "vocab_size": 510}
WIDE |= {"intermediate_size": 256, "num_hidden_layers": 1, "num_key_value_heads": 2}
WIDE |= {"max_position_embeddings": 128, "initializer_range": 0.03, "hidden_act": "relu"}


def run(kernels: HeadKernels, K: int, V: int, **columns: float) -> Choice:
    """A step and what follows it, with near ties; of x and of a row `columns` of values."""
    H, blocks = HEADS[K]
    model = Model(K, 128, H, 2, 392, 1, 3, kind="int4", vocabulary=V)
    model.head = near_ties(model)
    if "x" in columns:
        model.last_norm[5] = columns["x"]
    if "row" in columns:
        model.head[V // 2, 5] = columns["row"]
    return choice_of(kernels, model.head, emulate(kernels, model, blocks, "dense", (1,)))


def check_near_ties(kernels: HeadKernels, K: int, V: int) -> None:
    choice = run(kernels, K, V)
    choice.check()
    is_refined = choice.refined != choice.rough
    assert 40 <= is_refined.sum() < 100
    assert choice.rough.argmax() != choice.exact.argmax()
    assert (choice.rough - choice.exact).abs().max() < 0.05
    error = choice.estimate.most[0, :V] - choice.rough
    assert ((choice.rough - choice.exact).abs() <= error).all()
    assert choice.estimate.least.max() <= choice.exact.max()


@pytest.mark.parametrize(("K", "V"), SIZES)
def test_the_choice_among_near_ties(K, V):
    check_near_ties(HeadKernels(), K, V)


@pytest.mark.parametrize(
    "columns",
    [
        {"row": torch.nan},
        *([{"x": torch.inf}, {"x": torch.nan}, {"row": -torch.inf}] if EVERY_CASE else []),
    ],
)
def test_what_is_not_finite_is_as_of_the_bf16_head(columns):
    choice = run(HeadKernels(), 1536, 509, **columns)
    choice.check()
    assert choice.is_exact.all() if "x" in columns else choice.is_exact[254]


# ---- refine alone, by estimates as a step gives them


def estimated(head: torch.Tensor, x: torch.Tensor, warps: int) -> Estimate:
    """As step_head.cuh; `least` by as many warps as there may be, which have some rows each."""
    codes, scales = rounded(head)
    logits = ((codes * scales[:, :1]).double() @ x.double()[0]).float()
    error = scales[:, 1] * x.float().norm()
    least = torch.full((warps,), -torch.inf)
    for i, one in enumerate((logits - error).tolist()):
        least[i % warps] = max(one, least[i % warps])
    return Estimate(logits[None].clone(), (logits + error)[None], least, x)


@pytest.mark.parametrize("K", HEADS)
@pytest.mark.parametrize(("V", "tied"), [(3, 0), (255, 255), (1030, 9), (257, 40)])
def test_refined_logits_have_the_bits_of_the_product(K, V, tied):
    generator = torch.Generator().manual_seed(V)
    x = torch.randn(1, K, generator=generator).bfloat16()
    head = torch.randn(V, K, generator=generator).bfloat16() / 32
    head[torch.randperm(V, generator=generator)[:tied]] = (x[0] / 32).bfloat16()
    estimate, kernels = estimated(head, x, 1056), HeadKernels()
    choice = choice_of(kernels, head, Done(estimate.logits, None, [], x, estimate))
    choice.check()
    assert choice.is_exact.sum() >= max(1, tied)


def check_unknown(kernels: HeadKernels) -> None:
    """Where nothing is known all is refined; where all is known nothing."""
    generator = torch.Generator().manual_seed(0)
    x, head = (torch.randn(n, 1536, generator=generator).bfloat16() for n in (1, 300))
    nan = torch.full((1, 300), torch.nan)
    estimate = Estimate(nan.clone(), nan, torch.full((9,), -torch.inf), x)
    refine(kernels, head, estimate)
    exact = few_linear(kernels, H200, x, plain_weight(head), wide=True)
    assert torch.equal(estimate.logits, exact)
    known = Estimate(nan.clone(), torch.zeros(1, 300), torch.ones(9), x)
    refine(kernels, head, known)
    assert known.logits.isnan().all()


def test_where_nothing_is_known_all_is_refined():
    check_unknown(HeadKernels())


# ---- in a decoder


@torch.inference_mode()
def test_a_decoder_gives_the_logits_that_are_wanted(monkeypatch):
    kernels = DecoderKernels()
    for module in (kernel_decoder, kernel_fit):
        monkeypatch.setattr(module, "kernels_for", lambda sources, index: kernels)
        monkeypatch.setattr(module, "device_limits", lambda index: replace(H200, num_sms=96))
    monkeypatch.setattr(kernel_fit, "takes_hopper_kernels", lambda index: True)
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **WIDE)
    model = AutoModelForCausalLM.from_config(config).eval().bfloat16()
    model.lm_head.weight[255:] = model.lm_head.weight[:255]
    model.lm_head.weight[255:, 7].view(torch.int16).bitwise_xor_(1)
    round_to_int4(model)
    decoder = attached(KernelDecoder(model), 3)
    kernels.beside = [*read_by(decoder._in_int4)]
    token = torch.tensor([[7]], dtype=torch.int32)
    inputs = token, token * 0, torch.ones_like(token)
    exact, choice, rough = (decoder.run(*inputs, wanted=w)[0][0, 0] for w in Wanted)
    assert exact.shape == (510,)
    if EVERY_CASE:
        one_by_one = decoder.ways(1)["dense"](*inputs)[0][0]
        assert (exact - one_by_one).abs().max() < 0.02 * exact.std()
    is_refined = choice != rough
    assert torch.equal(choice[is_refined], exact[is_refined])
    assert choice.argmax() == exact.argmax()
    assert 0 < (rough - exact).abs().max() < 0.05 * exact.std()
