"""Stable decoding and drafts over the kernels as they are, emulated: the same bits in any pass."""

import pytest
import torch
from attached import attached
from compiled import EVERY_CASE
from emulated_kernels import EmulatedKernels, needs_emulator
from exact_pairs import like_a_fit
from greedy import run_all
from transformers import AutoConfig, AutoModelForCausalLM

from twellctl.bundle.twell_plan import Limits
from twellctl.decoding import kernel_decoder, kernel_fit
from twellctl.decoding.engine import Sampling
from twellctl.decoding.kernel_decoder import KernelDecoder
from twellctl.decoding.opening import open_scheduler
from twellctl.decoding.rounds import Drafts
from twellctl.decoding.torch_decoder import padded

pytestmark = needs_emulator
H200 = Limits(132, 232448, (9, 0))
PROMPTS = ([3, 1, 4, 1, 5], [9, 2], [6] * 70)


class Kernels(EmulatedKernels):
    """The kernel in front has always ended."""

    def launch(self, name, grid, block, args, smem_bytes=0, *, overlap=False):
        super().launch(name, grid, block, args, smem_bytes)


@pytest.fixture(params=["silu", "relu"] if EVERY_CASE else ["relu"])
def model(request, monkeypatch):
    """A tiny model in bf16, which the kernels drive."""
    made = Kernels()
    for module in (kernel_decoder, kernel_fit):
        monkeypatch.setattr(module, "kernels_for", lambda sources, index: made)
        monkeypatch.setattr(module, "device_limits", lambda index: H200)
    monkeypatch.setattr(kernel_fit, "takes_hopper_kernels", lambda index: False)
    monkeypatch.setattr(KernelDecoder, "why_not", staticmethod(lambda model: None))
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=67,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=1,
        hidden_act=request.param,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.2,
        eos_token_id=None,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config).eval().bfloat16()


@torch.inference_mode()
def test_a_token_has_the_same_bits_in_any_pass(model):
    decoder = attached(KernelDecoder(model, stable=True), 12)
    rows = [[*prompt, *range(20, 28)] for prompt in PROMPTS]
    pages = [[1, 2], [3, 4], [5, 6]]
    for row, own in zip(rows, pages, strict=True):
        decoder.run(*padded([(row[:-8], 0, own)]), last=0)

    def logits_of(some: list[int], count: int, first: int = 0) -> torch.Tensor:
        at = [len(rows[i]) - 8 + first for i in some]
        parts = [(rows[i][n : n + count], n, pages[i]) for i, n in zip(some, at, strict=True)]
        return decoder.run(*padded(parts), last=count)[0].clone()

    alone = torch.stack([torch.cat([logits_of([i], 1, j)[0] for j in range(8)]) for i in range(3)])
    assert alone.isfinite().all()
    for some, count in (([0], 2), ([2], 8), ([0, 1], 3), ([0, 1, 2], 8)):
        assert torch.equal(logits_of(some, count), alone[some, :count]), (some, count)


@pytest.mark.skipif(
    not EVERY_CASE, reason="takes long, and tests/gpu runs it: TWELL_TEST_EVERY_CASE"
)
def test_tokens_are_those_of_the_model_alone(model):
    sampling, draft = Sampling(8, 0.7, seed=2), like_a_fit(model)
    stable = open_scheduler(model, stable=True)
    known = [run_all(stable, [prompt], sampling)[0][0] for prompt in PROMPTS[:2]]
    scheduler = open_scheduler(model, draft=draft, drafts=Drafts(3))
    assert type(scheduler.decoder) is KernelDecoder
    for prompt, tokens in zip(PROMPTS[:2], known, strict=True):
        assert run_all(scheduler, [prompt], sampling)[0] == [tokens]
    assert 0 < scheduler.tally.drafted.num_kept <= scheduler.tally.drafted.num_read
