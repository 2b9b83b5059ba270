"""Stable decoding and drafts over kernels with plain PyTorch in their place, on a CPU."""

import gc
import weakref

import pytest
from draft_heads import random_head, rounded, rounded_head
from exact_pairs import like_a_fit
from greedy import run_all
from played_kernels import SIZES, Kernels, stand_in

from twellctl.decoding.engine import Sampling
from twellctl.decoding.head_drafter import HeadDrafter
from twellctl.decoding.kernel_decoder import KernelDecoder
from twellctl.decoding.opening import describe_decoder, open_scheduler
from twellctl.decoding.rounds import Drafts
from twellctl.decoding.sampler import Field
from twellctl.decoding.stable import STABLE_ROWS, why_not_stable
from twellctl.decoding.torch_decoder import TorchDecoder
from twellctl.models.quantised import round_model
from twellctl.models.schemes import SCHEMES

LOOKUP = 1  # the second drafter


@pytest.fixture(autouse=True)
def kernels(monkeypatch) -> Kernels:
    return stand_in(monkeypatch)


@pytest.mark.parametrize(
    ("family", "activation", "drafts"),
    [("llama", "silu", 7), ("phi3", "gelu", 3), ("llama", "relu", 1)],
)
def test_a_fit_drafts_for_its_original(
    tiny, generated, prompts, monkeypatch, family, activation, drafts
):
    """Over one cache, and one tensor of each weight that both have."""
    sizes = SIZES | {"intermediate_size": 128} | ({"hidden_size": 256} if family == "phi3" else {})
    model = tiny(family, **sizes, hidden_act=activation)
    known = [generated(model, prompt, 12) for prompt in prompts]
    fit = like_a_fit(model)
    monkeypatch.setattr(KernelDecoder, "why_not", staticmethod(lambda model: None))
    how = {"max_running": 3, "draft": fit, "drafts": Drafts(drafts)}
    scheduler = open_scheduler(model, **how)
    assert type(scheduler.decoder) is KernelDecoder
    assert scheduler.decoder.max_rows == STABLE_ROWS
    assert set(scheduler.decoder.ways(1)) == {"dense"}
    assert run_all(scheduler, prompts, Sampling(12, 0))[0] == known
    for prompt, tokens in zip(prompts, known, strict=True):
        assert run_all(scheduler, [prompt], Sampling(12, 0))[0] == [tokens]
    assert 0 < scheduler.tally.drafted.num_kept < scheduler.tally.drafted.num_read
    for layer, other in zip(model.model.layers, fit.model.layers, strict=True):
        assert layer.self_attn.o_proj.weight is other.self_attn.o_proj.weight


@pytest.mark.parametrize(
    ("family", "changes"),
    [("qwen3", {}), ("qwen2", {"hidden_size": 128, "head_dim": 32})],
)
def test_a_draft_head_guesses_the_same_over_kernels(
    tiny, generated, prompts, monkeypatch, family, changes
):
    """As in plain PyTorch, which has no cache of the head; the tokens are the model's. All of a
    hidden size of 128 is rounded."""
    model = tiny(family, **SIZES | changes, intermediate_size=128, hidden_act="silu")
    lm_head = model.lm_head.weight
    lm_head.data = rounded(lm_head, model.config.hidden_size)
    head = rounded_head(random_head(model, 300))  # as kernels round it
    known = [generated(model, prompt, 12) for prompt in prompts]
    drafts: dict[type, list] = {}
    draft = HeadDrafter.draft

    def drafting(self, fields, tables, count, *how):
        found = draft(self, fields, tables, count, *how)
        room = int(fields[Field.LIMIT, 0] - fields[Field.POSITION, 0])
        drafts.setdefault(kind, []).append(found[0, :room].tolist())
        return found

    monkeypatch.setattr(HeadDrafter, "draft", drafting)
    for kind in (TorchDecoder, KernelDecoder):
        if kind is KernelDecoder:
            monkeypatch.setattr(KernelDecoder, "why_not", staticmethod(lambda model: None))
        scheduler = open_scheduler(model, draft=head, drafts=Drafts(5))
        assert type(scheduler.decoder) is kind
        for prompt, tokens in zip(prompts, known, strict=True):
            assert run_all(scheduler, [prompt], Sampling(12, 0))[0] == [tokens]
    assert drafts[KernelDecoder] == drafts[TorchDecoder]


def test_weights_of_a_head_are_not_kept_on_the_host(tiny, monkeypatch):
    monkeypatch.setattr(KernelDecoder, "why_not", staticmethod(lambda model: None))
    model = tiny(**SIZES, intermediate_size=128, hidden_act="silu")
    head = random_head(model)
    left = weakref.ref(head)
    scheduler = open_scheduler(model, draft=head)
    del head
    gc.collect()
    assert left() is None
    assert run_all(scheduler, [[1, 2, 3]], Sampling(4, 0))[0]


@pytest.mark.parametrize(("num_rows", "num_drafts"), [(3, 7), (5, 3), (16, 1), (17, 0)])
def test_more_rows_leave_room_for_fewer_drafts(tiny, monkeypatch, num_rows, num_drafts):
    """A stable pass reads no more tokens than products of one order take."""
    model = tiny(**SIZES, intermediate_size=128, hidden_act="silu")
    monkeypatch.setattr(KernelDecoder, "why_not", staticmethod(lambda model: None))
    how = {"max_running": 20, "draft": like_a_fit(model), "drafts": Drafts(7, LOOKUP)}
    scheduler = open_scheduler(model, **how)
    read, run = [], scheduler.decoder.run
    scheduler.decoder.run = lambda tokens, *inputs, **how: (
        read.append((tuple(tokens.shape), how["last"])) or run(tokens, *inputs, **how)
    )
    prompts = [[1 + row, 7, 400 - row] for row in range(num_rows)]
    found, _ = run_all(scheduler, prompts, sampling := Sampling(24, 0))
    rounds = [shape for shape, last in read if shape[1] == last]
    assert all(B * Q <= STABLE_ROWS for B, Q in rounds)
    assert max(rounds)[1] == 1 + num_drafts
    plain = open_scheduler(model, max_running=20, decoder=KernelDecoder(model, stable=True))
    assert found == run_all(plain, prompts, sampling)[0]


def test_what_the_kernels_do_not_stably(tiny, monkeypatch):
    assert why_not_stable(tiny(**SIZES, intermediate_size=128)) is None
    said = "a layer of LlamaForCausalLM has 136 inputs, no multiple of 64"
    assert why_not_stable(odd := tiny(**SIZES, intermediate_size=136)) == said
    monkeypatch.setattr(KernelDecoder, "why_not", staticmethod(lambda model: None))
    assert describe_decoder(odd) == "twellctl's kernels"
    assert describe_decoder(odd, stable=True) == f"transformers' own code ({said})"
    rounded = tiny(**SIZES, intermediate_size=128)
    round_model(rounded, SCHEMES["fp8"])
    assert why_not_stable(rounded) == "the decode kernels are stable in bf16, not over e4m3"
