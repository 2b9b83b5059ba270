"""Models that are codes of 4 bits alone on a GPU: what they say, and what of them is in memory."""

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from attached import attached
from greedy import run_all
from packed_models import linears, packed, packed_draft
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from twellctl.bench.held import held_bytes
from twellctl.bundle.twell_int4 import expand
from twellctl.decoding.coded_decoder import CodedDecoder
from twellctl.decoding.coded_linear import CodedLinear, expand_layers
from twellctl.decoding.decoder import Wanted
from twellctl.decoding.engine import Sampling
from twellctl.decoding.kernel_decoder import KernelDecoder
from twellctl.decoding.opening import open_scheduler, open_schedulers
from twellctl.decoding.rounds import Drafts
from twellctl.decoding.scheduler import Scheduler
from twellctl.decoding.torch_decoder import TorchDecoder, padded

pytestmark = pytest.mark.gpu
HEADS = {1536: 12, 2048: 16, 3072: 24, 3584: 28, 4096: 32}  # by hidden size
CACHE = 64 << 20


def make(K: int = 1536, act: str = "silu", family: str = "llama", **changes) -> PreTrainedModel:
    """A random model in bf16 on the CPU."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": 4099,
        "hidden_size": K,
        "intermediate_size": 1408,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS[K],
        "num_key_value_heads": 4,
        "max_position_embeddings": 1024,
        "initializer_range": 0.03,
        "hidden_act": act,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(family, **settings | changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("K", HEADS)
@pytest.mark.parametrize("act", ["relu", "silu"])
@torch.inference_mode()
def test_a_decoder_over_codes_alone(K, act):
    """Steps err no more than the model's own forward in bf16, or the kernels over copies."""
    model = packed(make(K, act).cuda())
    beside = copy.deepcopy(model)
    expand_layers(beside)
    assert CodedDecoder.why_not(model) is None
    coded, judge = attached(CodedDecoder(model), 17), attached(KernelDecoder(beside), 17)
    plain = attached(TorchDecoder(beside), 17)
    for name, layer in model.named_modules():
        if isinstance(layer, CodedLinear):
            made = layer.expand()
            assert torch.equal(made, expand(*layer.parts())), name
            assert torch.equal(made, beside.get_submodule(name).weight), name
    text = torch.randint(4099, (300,)).tolist()
    for decoder in (coded, judge, plain):
        decoder.run(*padded([(text, 0, [1, 2, 3, 4, 5])]), last=0)
    given = [part.cuda() for part in padded([([7], 300, [1, 2, 3, 4, 5])])]
    of_model, _ = plain.run(*given)
    others, fired = judge.run(*given)
    wide = beside.float()(torch.tensor([[*text, 7]], device="cuda")).logits[0, -1]
    logits, counts = coded.run(*given)
    err, most = away(of_model, wide).mean(), away(of_model, wide).max()
    for found in (logits, others):
        assert away(found, wide).mean() < 1.5 * err
        assert away(found, wide).max() < 2 * most
    if act == "relu":
        assert (counts - fired).abs().max() <= 8
    for wanted in (Wanted.CHOICE, Wanted.ROUGH):
        near, _ = coded.run(*given, wanted=wanted)
        assert (near - logits).abs().max() < 0.06 * wide.std()


def away(logits: Tensor, wanted: Tensor) -> Tensor:
    """How far each logit is from the one that is wanted."""
    return (logits.flatten().float() - wanted).abs()


@pytest.mark.parametrize("drafts", [Drafts(1), Drafts(7), None])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_exact_answers_are_drafted_over_codes_alone(family, drafts):
    model = make(family=family).cuda()
    draft = packed_draft(model, copy.deepcopy(model))
    prompts = [torch.randint(1, 4000, (length,)).tolist() for length in (5, 70, 1, 300)]
    judge = open_scheduler(model, stable=True, cache_bytes=CACHE)
    how = {"draft": draft, "drafts": drafts, "cache_bytes": CACHE, "draft_alone": True}
    scheduler, alone = open_schedulers(model, **how)
    assert type(alone.decoder) is CodedDecoder
    for sampling in (Sampling(60, 0, top_logprobs=2), Sampling(60, 0.8, seed=3)):
        known = [run_all(judge, [prompt], sampling)[1] for prompt in prompts]
        for prompt, tokens in zip(prompts, known, strict=True):
            assert run_all(scheduler, [prompt], sampling)[1] == tokens
        ids = [[token.id for token in tokens] for tokens in known]
        assert run_all(scheduler, prompts, sampling)[0] == ids
    drafted = scheduler.tally.drafted
    assert drafts is None or 0 < drafted.kept["fit"] < drafted.read["fit"]
    texts = run_all(alone, prompts, Sampling(30, 0))[0]
    assert texts == [run_all(alone, [prompt], Sampling(30, 0))[0][0] for prompt in prompts]


def test_prompts_are_those_of_weights_in_bf16():
    """Of one token and of many, over chunks: they err no more than the expanded model's own forward
    in bf16."""
    model = packed(make(max_position_embeddings=8192).cuda())
    beside = copy.deepcopy(model)
    expand_layers(beside)
    wide = copy.deepcopy(beside).float()
    coded, plain = attached(CodedDecoder(model), 100), attached(TorchDecoder(beside), 100)
    for length in (2, 16, 512, 5000):
        text = torch.randint(4099, (length,)).tolist()
        pages = [*range(1, 1 + length // 64 + 1)]
        with torch.inference_mode():
            given = padded([(text, 0, pages)])
            found, known = coded.run(*given)[0], plain.run(*given)[0]
            exact = wide(torch.tensor([text], device="cuda")).logits[0, -1]
        assert away(found, exact).mean() < 1.5 * away(known, exact).mean(), length
        assert away(found, exact).max() < 2 * away(known, exact).max(), length


# ---- memory


def held(open_it: Callable[[], Scheduler]) -> tuple[int, int]:
    """Bytes that a scheduler holds but for its cache, and that were allocated at most; it is gone
    afterwards."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    scheduler = open_it()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    cache = scheduler.admission.pool.capacity + 1
    size = torch.cuda.memory_allocated() - before - cache * _page_bytes(scheduler)
    assert size == pytest.approx(held_bytes(scheduler), rel=0.04)
    return size, torch.cuda.max_memory_allocated() - before


def _page_bytes(scheduler: Scheduler) -> int:
    return sum(shape.page_bytes for shape in scheduler.decoder.shapes)


def test_what_is_in_memory():
    """An original alone, the same in 4 bits alone, and both for exact answers."""
    small = 32 << 20
    original = make(
        intermediate_size=8960, num_hidden_layers=8, vocab_size=32001, num_key_value_heads=2
    )
    size, table = linears(original), 32001 * 1536
    codes = size * 17 // 32
    four = packed(copy.deepcopy(original).cuda()).cpu()
    how = {"cache_bytes": CACHE}

    def pair() -> Scheduler:
        model, draft = copy.deepcopy(original), copy.deepcopy(four)
        for part in ("model.embed_tokens", "lm_head", "model.norm"):
            draft.set_submodule(part, model.get_submodule(part))
        return open_scheduler(model.cuda(), draft=draft.cuda(), **how)

    alone, _ = held(lambda: open_scheduler(copy.deepcopy(original).cuda(), stable=True, **how))
    assert alone == pytest.approx(2 * size + 4 * table, abs=small)
    in_4_bits, most = held(lambda: open_scheduler(copy.deepcopy(four).cuda(), max_running=1, **how))
    assert in_4_bits == pytest.approx(codes + 5 * table, abs=small)
    assert most < CACHE + 5 * table + 1.6 * size  # no copy of all layers in bf16 at any time
    exact, _ = held(pair)
    assert exact == pytest.approx(alone + codes + table, abs=small)
