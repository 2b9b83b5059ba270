"""Models that are codes of 4 bits alone: what they compute, and what of them is in memory."""

import copy

import pytest
import torch
from greedy import assert_greedy, run_all
from packed_models import linears, packed, packed_draft
from played_kernels import Kernels, stand_in
from torch import nn
from transformers import PreTrainedModel

from twellctl.bench.held import held_bytes
from twellctl.bundle.twell_int4 import kept_codes
from twellctl.decoding import kernel_fit
from twellctl.decoding.coded_decoder import CodedDecoder
from twellctl.decoding.coded_linear import CODED, CodedLinear, expand_layers
from twellctl.decoding.decoder import Wanted
from twellctl.decoding.engine import Sampling
from twellctl.decoding.kernel_decoder import KernelDecoder
from twellctl.decoding.opening import (
    describe_decoder,
    open_decoder,
    open_scheduler,
    open_schedulers,
    why_no_gain,
)
from twellctl.decoding.prompts import Prompts
from twellctl.decoding.rounds import Drafts
from twellctl.decoding.torch_decoder import TorchDecoder

WIDE = {"hidden_size": 1536, "head_dim": 128, "num_attention_heads": 12, "vocab_size": 512}
WIDE |= {"intermediate_size": 256, "num_hidden_layers": 2, "initializer_range": 0.03}
WIDE |= {"attention_bias": True}
WIDE |= {"max_position_embeddings": 256, "num_key_value_heads": 2}
KINDS = {"relu": ("llama", "relu"), "silu": ("llama", "silu"), "fused": ("phi3", "relu")}
CACHE = {"cache_bytes": 1 << 20}
PROMPTS = ([9], [*range(20, 80)])  # whose answers go on in the next page


class Played(CodedDecoder):
    """Its step in one kernel is a prompt of one token, which is not filled up."""

    def attach(self, cache):
        super().attach(cache)
        self.wanted: set[Wanted] = set()

        def step(tokens, positions, tables, wanted):
            self.wanted.add(wanted)
            prompt = Prompts.of(tokens, positions, tables, 1, self.device)
            logits, fired = self._prompts._run(prompt)
            counts = fired[..., 0] if len(fired) else torch.zeros(len(self._coded), 1).int()
            return logits[0].float(), counts

        self._kernels, self._steps = self._steps, dict.fromkeys(self._steps, step)


@pytest.fixture(autouse=True)
def kernels(monkeypatch) -> Kernels:
    monkeypatch.setattr("twellctl.decoding.opening.CodedDecoder", Played)
    monkeypatch.setattr(kernel_fit, "why_not", lambda model: None)
    monkeypatch.setattr(KernelDecoder, "why_not", staticmethod(lambda model: None))
    return stand_in(monkeypatch, torch.bfloat16)


def make(tiny, kind: str = "relu", **changes) -> PreTrainedModel:
    family, activation = KINDS[kind]
    model = tiny(family, **WIDE | changes, hidden_act=activation)
    return model.bfloat16().requires_grad_(False)


def expanded(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose layers have their weights."""
    expand_layers(copied := copy.deepcopy(model))
    return copied


def weights_in_bf16(model: PreTrainedModel) -> list[str]:
    """Names of the linear layers of the decoder layers that have one."""
    parts = model.model.layers.named_modules()
    return [name for name, m in parts if isinstance(m, nn.Linear)]


@pytest.mark.parametrize("kind", KINDS)
def test_one_sequence_goes_over_the_codes_alone(tiny, kernels, kind):
    """Of two layers where they are ReLU."""
    model = packed(make(tiny, kind, num_hidden_layers=2 if kind == "relu" else 1))
    scheduler = open_scheduler(model, max_running=1, **CACHE)
    judge, decoder = expanded(model), scheduler.decoder
    counting = open_scheduler(judge, decoder=TorchDecoder(judge), max_running=1, **CACHE)
    assert type(decoder) is Played
    assert weights_in_bf16(model) == []
    sampling = Sampling(9, 0, densities=kind != "silu")
    for prompt in PROMPTS:
        [ids], tokens = run_all(scheduler, [prompt], sampling)
        assert_greedy(judge, prompt, ids)
        first = run_all(counting, [prompt], sampling)[1][0]
        if kind != "silu":
            assert tokens[0].densities == pytest.approx(first.densities, abs=0.03)
    assert decoder.wanted == {Wanted.EXACT, Wanted.CHOICE}  # of a prompt of one token, of answers
    entries = {"step_1536_128_dense_int4", "refine", "expand_quads", "expand_neurons"}
    assert {*kernels.prepared} == entries | ({"step_1536_128_int4"} if kind != "silu" else set())
    assert describe_decoder(model) == "twellctl's kernels"


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_over_codes_is_the_layer_that_was_packed(tiny, kind):
    model = packed(make(tiny, kind))
    plain = dict(expanded(model).named_modules())
    CodedDecoder(model)
    coded = {name: m for name, m in model.named_modules() if isinstance(m, CodedLinear)}
    assert len(coded) == sum("packed" in m._buffers for m in plain.values())
    for name, layer in coded.items():
        assert torch.equal(layer.expand(), plain[name].weight), name
        x = torch.randn(3, layer.in_features).bfloat16()
        torch.testing.assert_close(layer(x), plain[name](x), rtol=0.02, atol=0.02)
    CodedDecoder(model)  # a second one lays nothing anew
    again = {name: m for name, m in model.named_modules() if isinstance(m, CodedLinear)}
    assert all(again[name] is layer for name, layer in coded.items())
    expand_layers(model)
    for name, layer in model.named_modules():
        if name in coded:
            assert torch.equal(layer.weight, plain[name].weight)
            for part, known in zip(kept_codes(layer), kept_codes(plain[name]), strict=True):
                assert torch.equal(part, known), name


def test_several_sequences_have_weights_in_bf16(tiny):
    for how in ({}, {"alone": True, "stable": True}):
        model = packed(make(tiny))
        assert type(open_decoder(model, **how)) is KernelDecoder
        assert not any(isinstance(m, CODED) for m in model.modules())
    model = packed(make(tiny))
    scheduler = open_scheduler(model, max_running=2, **CACHE)
    assert type(scheduler.decoder) is KernelDecoder
    assert scheduler.decoder.step_kind == "int4"


def test_what_does_not_go_over_codes_alone(tiny, monkeypatch):
    assert CodedDecoder.why_not(packed(make(tiny))) is None
    said = "the linear layers are more than codes of 4 bits"
    assert CodedDecoder.why_not(make(tiny)) == said
    assert CodedDecoder.why_not(expanded(packed(make(tiny)))) == said
    narrow = packed(tiny("llama").bfloat16())
    assert "a hidden size of 32" in CodedDecoder.why_not(narrow)
    assert not weights_in_bf16(narrow)
    fine = packed(make(tiny, "silu", intermediate_size=544))  # in groups of 32
    assert "codes of other groups" in CodedDecoder.why_not(fine)
    assert type(open_scheduler(fine, max_running=1, **CACHE).decoder) is KernelDecoder
    monkeypatch.setattr(kernel_fit, "why_not", lambda model: "there is no GPU")
    assert CodedDecoder.why_not(packed(make(tiny))) == "there is no GPU"


@pytest.mark.parametrize("drafts", [Drafts(3), None])
def test_exact_answers_are_drafted_over_codes_alone(tiny, drafts):
    model = make(tiny, "silu", num_hidden_layers=1)
    draft = packed_draft(model, copy.deepcopy(model))
    judge = open_scheduler(model, stable=True, **CACHE)
    assert why_no_gain(model, draft) is None
    how = {"max_running": 3, "draft": draft, "drafts": drafts}
    scheduler, alone = open_schedulers(model, draft_alone=True, **how, **CACHE)
    for sampling in (Sampling(10, 0), Sampling(6, 0.8, seed=3)):
        known = [run_all(judge, [prompt], sampling)[1] for prompt in PROMPTS]
        for prompt, tokens in zip(PROMPTS, known, strict=True):
            assert run_all(scheduler, [prompt], sampling)[1] == tokens
        ids = [[token.id for token in tokens] for tokens in known]
        assert run_all(scheduler, PROMPTS, sampling)[0] == ids
    drafted = scheduler.tally.drafted
    assert drafted.read["fit"] > 0
    assert drafts is None or 0 < drafted.kept["fit"] < drafted.read["fit"]
    assert alone.max_running == 1
    texts = run_all(alone, PROMPTS, Sampling(9, 0))[0]  # one after the other
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert_greedy(expanded(draft), prompt, text)
    assert alone.decoder.wanted == {*Wanted}


def bytes_of(model: PreTrainedModel, **how) -> int:
    scheduler = open_scheduler(model, **how, **CACHE)
    held = held_bytes(scheduler)
    assert held > held_bytes(scheduler.decoder._model.lm_head)
    return held


def test_what_is_in_memory(tiny):
    """Linear layers take two bytes a weight, or 17/32 as codes of groups of 64; all else is small
    but embeddings and heads."""
    small = 3 << 20
    wide = {"intermediate_size": 2048, "vocab_size": 4096}
    model = make(tiny, "silu", **wide)
    size, table = linears(model), 4096 * 1536
    assert held_bytes(model) == pytest.approx(2 * size + 4 * table, abs=small)
    codes = size * 17 // 32
    four = packed(copy.deepcopy(model))
    alone = bytes_of(four, max_running=1)
    assert alone == pytest.approx(codes + 5 * table, abs=small)  # a byte a weight of the head
    beside = bytes_of(packed(copy.deepcopy(model)), max_running=2)
    assert beside == pytest.approx(2 * size + 2 * codes + 5 * table, abs=small)
    original = bytes_of(model, stable=True)
    assert original == pytest.approx(2 * size + 4 * table, abs=small)
    larger = open_scheduler(model, stable=True, cache_bytes=8 << 20)
    assert held_bytes(larger) == pytest.approx(original, abs=1 << 16)  # but for the cache
    draft = packed_draft(model, copy.deepcopy(model))
    exact = bytes_of(model, draft=draft)
    assert exact == pytest.approx(original + codes + table, abs=small)
