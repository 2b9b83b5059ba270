"""A draft head over emulated kernels: in one kernel its layer is what it is in PyTorch."""

from dataclasses import replace

import pytest
import torch
from compiled import EVERY_CASE
from draft_heads import assert_alike, random_head, rounded, rounded_head
from emulated_head import H200, DecoderKernels, HeadKernels, read_by
from emulated_kernels import needs_emulator
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from twellctl.decoding import kernel_decoder, kernel_fit
from twellctl.decoding.head_drafter import HeadDrafter
from twellctl.decoding.kernel_decoder import KernelDecoder
from twellctl.decoding.norms import join_norms, rms_norm
from twellctl.decoding.paged_cache import PagedCache
from twellctl.decoding.sampler import Field, Variant
from twellctl.decoding.torch_head import TorchHead

pytestmark = needs_emulator
# family, sizes, blocks, what the layer goes in
QWEN = {"hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2}
LLAMA = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8}
WIDE = {"hidden_size": 3072, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 256}
CASES = [("qwen2", QWEN, 96, "step_1536_128_dense_e4m3")]
if EVERY_CASE:
    CASES += [("llama", LLAMA, 128, "step_2048_64_dense_e4m3")]
    CASES += [("llama", WIDE, 96, "step_3072_256_dense")]


class Noted(DecoderKernels):
    """They note what is launched."""

    def launch(self, name, *given, **how):
        self.launched = [*getattr(self, "launched", []), name]
        super().launch(name, *given, **how)


@torch.inference_mode()
@pytest.mark.parametrize(("family", "own", "blocks", "step"), CASES)
def test_a_draft_in_few_launches_is_as_in_pytorch(family, own, blocks, step, monkeypatch):
    kernels, limits = Noted(), replace(H200, num_sms=blocks)
    for module in (kernel_decoder, kernel_fit):
        monkeypatch.setattr(module, "kernels_for", lambda sources, index: kernels)
        monkeypatch.setattr(module, "device_limits", lambda index: limits)
    monkeypatch.setattr(kernel_fit, "takes_hopper_kernels", lambda index: True)
    sizes = {"vocab_size": 300, "intermediate_size": 256, "num_hidden_layers": 1}
    sizes |= {"max_position_embeddings": 192, "hidden_act": "silu"}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **own, **sizes)
    model = AutoModelForCausalLM.from_config(config).eval().bfloat16()
    decoder = KernelDecoder(model, stable=True)
    cache = PagedCache(decoder.shapes, 4, decoder.device)
    decoder.attach(cache)
    for pages in (*cache.keys, *cache.values):
        pages.normal_()
    head = random_head(model, 250)
    ours = decoder.open_head(head)
    kernels.beside = [*read_by([ours._layer])]
    judge = TorchHead(rounded_head(head, step.endswith("e4m3")), model, cache, decoder.context)
    judge._rows = rounded(judge._rows, head.sizes.K)
    tables = torch.tensor([[3, 1]], dtype=torch.int32)
    states = torch.randn(1, (1 + len(head.sizes.lower)) * head.sizes.K).bfloat16()
    assert_alike(judge, ours, tables, 63, states, 2 if EVERY_CASE else 1)
    norm, merge, _, product, _, rows = kernels.launched[:6]
    assert norm == "rms_norm"  # of one lower layer
    drafts = kernels.launched[2:]
    assert drafts == len(drafts) // 4 * ["join_norms", product, step, rows]
    assert merge.startswith("few_linear_1")
    assert product.startswith("few_linear_1")
    assert rows.startswith("few_linear_1")
    assert_little_besides(kernels, HeadDrafter(head, decoder), tables)


def assert_little_besides(kernels: Noted, drafter: HeadDrafter, tables: torch.Tensor) -> None:
    """Greedy drafts are launches of our own; torch copies the row, and what is chosen."""
    kernels.beside = [*read_by([drafter._guess._layer])]
    kernels.launched = []
    fields = torch.zeros(len(Field), 1, dtype=torch.int32)
    fields[Field.POSITION], fields[Field.LIMIT] = 63, 90
    with Operations() as operations:
        drafts = drafter.draft(fields, tables, 2, Variant(), None)
    assert set(drafts[0].tolist()) <= set(drafter._end._ids.tolist())
    assert len(kernels.launched) == 12
    assert kernels.launched[6::5] == ["choose", "choose"]
    assert sorted(operations.names) == ["clamp", "clone", "clone"]


class Operations(TorchDispatchMode):
    """Names of those that a GPU would have to launch, as long as it is entered."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        is_launched = not operation.is_view and "empty" not in operation.name()
        self.names += [operation.overloadpacket.__name__] if is_launched else []
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("K", [64, 8200])
def test_norms_that_are_joined(K):
    kernels, generator = HeadKernels(), torch.Generator().manual_seed(K)
    table, x, weights = (torch.randn(n, K, generator=generator).bfloat16() for n in (5, 1, 2))
    token, read = (torch.tensor(of, dtype=torch.int32) for of in ([3], [4, 8, 5]))
    made = join_norms(kernels, token, table, x, weights, 1e-5)
    states = torch.cat((-x, x, 2 * x))
    again = join_norms(kernels, token, table, states, weights, 1e-5, (read, token + 6))
    assert torch.equal(again, made)
    own = [rms_norm(kernels, *of, 1e-5) for of in zip((table[3:4], x), weights, strict=True)]
    assert torch.equal(made, torch.cat(own, 1))
    wide = torch.cat((table[3:4], x)).double()
    exact = wide / (wide.square().mean(1, keepdim=True) + 1e-5).sqrt() * weights
    assert (made.view(2, K) - exact).abs().max() < 0.02 * exact.abs().max()
