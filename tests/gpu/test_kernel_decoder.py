"""The decoder over kernels writes what the model itself finds likeliest, within bf16's rounding."""

import copy

import pytest
import torch
from attached import attached
from kernel_models import (
    FAMILIES,
    NUM_TOKENS,
    check_forms,
    check_written,
    dequantised,
    make,
    make_for_one_kernel,
    shortfalls,
    twice_each,
)

from twellctl.bench.decode_runs import timed_run
from twellctl.bundle.twell_reasons import takes_hopper_kernels
from twellctl.decoding.engine import Sampling
from twellctl.decoding.few_ways import OWN_PRODUCTS
from twellctl.decoding.kernel_decoder import KernelDecoder
from twellctl.decoding.opening import open_scheduler
from twellctl.decoding.paged_cache import PagedCache
from twellctl.models.quantised import round_model
from twellctl.models.schemes import SCHEMES

pytestmark = pytest.mark.gpu
LENGTHS = (5, 70, 130, 33, 1, 64)
FP8_FAMILIES = {
    "llama": {},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"head_dim": 64},
    "mistral": {"sliding_window": 40, "num_key_value_heads": 4},
    "phi3": {"num_key_value_heads": 4, "sliding_window": 40},
}


@pytest.mark.parametrize("form", ["sparse", "dense", "silu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_the_models_own(family, form):
    """Of SiLU in more rows than one launch of the head takes."""
    is_silu = form == "silu"
    model = make(family, FAMILIES[family] | {"hidden_act": "silu" if is_silu else "relu"})
    judge = copy.deepcopy(model).double()
    lengths = LENGTHS * 17 if is_silu else LENGTHS
    prompts = [torch.randint(1, 1000, (length,)).tolist() for length in lengths]
    assert KernelDecoder.why_not(model) is None

    def run():
        scheduler = open_scheduler(
            model,
            decoder=KernelDecoder(model, sparse=form != "dense"),
            max_running=len(prompts),  # no power of two
            cache_bytes=1 << 28,
        )
        return timed_run(scheduler, prompts, NUM_TOKENS).tokens

    tokens = run()
    assert [len(written) for written in tokens] == [NUM_TOKENS] * len(prompts)
    assert run() == tokens
    texts = zip(prompts, tokens, strict=True)
    usual, found = zip(*(shortfalls(judge, model, *text) for text in texts), strict=True)
    assert max(found) <= max(2 * max(usual), 0.1)


@pytest.mark.parametrize("family", FP8_FAMILIES)
def test_steps_over_fp8_weights(family):
    """Each form of a step, sparse or dense, is as near to float64 as such a step in bf16.

    With many rows PyTorch's products round their inputs to e4m3.
    """
    model = make(family, FP8_FAMILIES[family] | {"intermediate_size": 1408})
    round_model(model, SCHEMES["fp8"])
    judge = dequantised(model)
    assert KernelDecoder.why_not(model) is None
    decoders = {s: attached(KernelDecoder(model, s), 40) for s in (False, True)}
    for B in (1, 3, 16, 17, 64):
        tokens = torch.randint(1, 1000, (B, 1), dtype=torch.int32, device="cuda")
        pages = torch.arange(1, B + 1, dtype=torch.int32, device="cuda")[:, None] % 39 + 1
        inputs = tokens, torch.zeros_like(tokens), pages
        with torch.inference_mode():
            wanted = judge(tokens.long()).logits[:, 0]
        found = {
            f"{sparse} {name}": form(*inputs)
            for sparse, decoder in decoders.items()
            for name, form in decoder.ways(B).items()
        }
        assert {"False dense", "True union", "True dense"} <= found.keys()
        assert ("True pairs" in found) == (B >= 4 and takes_hopper_kernels(0))
        for name, (logits, _) in found.items():
            error = (logits - wanted).norm() / wanted.norm()
            assert error < (0.02 if B <= OWN_PRODUCTS else 0.1), (name, B)
        flips = (found["True union"][1] - found["True dense"][1]).abs().max()
        assert flips <= (8 if B <= OWN_PRODUCTS else 60), B


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "granite"])
def test_texts_together(family):
    """Through the engine: graphs, rows that come and go, pages that are taken anew."""
    model = make_for_one_kernel(family)
    judge = copy.deepcopy(model).double()
    prompts = [torch.randint(1, 1000, (length,)).tolist() for length in LENGTHS]

    def run():
        decoder = KernelDecoder(model)
        scheduler = open_scheduler(
            model, decoder=decoder, max_running=len(prompts), cache_bytes=1 << 28
        )
        return timed_run(scheduler, prompts, NUM_TOKENS).tokens

    tokens = run()
    assert run() == tokens
    for prompt, written in zip(prompts, tokens, strict=True):
        check_written(judge, model, prompt, written)


@pytest.mark.parametrize("M", [1, 8, 40])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_ways_of_a_step_one_by_one(family, M):
    """Each is as near to the model in float64 as the last; a step is one of them."""
    model = make(family)
    judge = copy.deepcopy(model).double()
    decoder = attached(KernelDecoder(model), M + 1)
    ids = torch.randint(1, 1000, (M, 34), device="cuda")
    tables = torch.arange(M, device="cuda").int()[:, None] + 1
    positions = torch.arange(34, device="cuda").int().repeat(M, 1)
    with torch.inference_mode():
        decoder.run(ids[:, :-1], positions[:, :-1], tables, last=0)
        inputs = ids[:, -1:].int().contiguous(), positions[:, -1:].contiguous(), tables
        forms = decoder.ways(M)
        assert {"union", "dense"} <= forms.keys()
        found = twice_each(forms, inputs)
        check_forms(found, judge(ids).logits[:, -1], counted=True)
        logits, counts = decoder.run(*inputs)
        name = decoder.plan.name(M)
        assert torch.equal(logits[:, 0], found[name][0])
        assert torch.equal(counts[..., 0], found[name][1])


@pytest.mark.parametrize("Q", [2, 5, 16])
@pytest.mark.parametrize("form", ["sparse", "dense", "silu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_several_tokens_of_a_row_in_one_pass(family, form, Q):
    """As near to float64 as steps with one token; a row has fewer tokens than the other one."""
    model = make(family, FAMILIES[family] | {"hidden_act": "silu" if form == "silu" else "relu"})
    judge = copy.deepcopy(model).double()
    decoder = attached(KernelDecoder(model, form != "dense"), 9)
    length = 90
    ids = torch.randint(1, 1000, (2, length + Q), device="cuda")
    tables = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32, device="cuda")
    positions = torch.arange(length + Q, device="cuda").int().repeat(2, 1)
    tokens, at = ids[:, length:].int(), positions[:, length:].contiguous()
    with torch.inference_mode():
        wanted = judge(ids).logits[:, length:]
        decoder.run(ids[:, :length], positions[:, :length], tables, last=0)
        steps = [
            decoder.run(tokens[:, j : j + 1].contiguous(), at[:, j : j + 1].contiguous(), tables)
            for j in range(Q)
        ]
        usual = (torch.cat([logits for logits, _ in steps], 1) - wanted).abs().max()
        logits, counts = decoder.run(tokens, at, tables, last=Q)
        assert (logits - wanted).abs().max() <= max(2 * usual, 0.05)
        known = torch.cat([fired for _, fired in steps], 2)
        assert counts.shape == known.shape
        assert (counts - known).abs().sum() <= 0.02 * known.sum() + 2
        short, places = torch.zeros_like(tokens), torch.full_like(at, -1)
        short[0], places[0] = tokens[0], at[0]
        short[1, 1:], places[1, 1:] = tokens[1, :-1], at[1, :-1]
        logits, _ = decoder.run(short, places, tables, last=Q)
        assert (logits[0] - wanted[0]).abs().max() <= max(2 * usual, 0.05)
        assert (logits[1, 1:] - wanted[1, :-1]).abs().max() <= max(2 * usual, 0.05)


@pytest.mark.parametrize("weights", ["bf16", "fp8"])
@pytest.mark.parametrize("kind", ["llama", "one kernel"])
def test_two_decoders_over_one_model_and_one_cache(kind, weights):
    """Each gives the bits that it gives alone, in whatever order they are made and used."""

    def opened():
        if kind == "llama":
            model = make("llama", {"intermediate_size": 1408})
        else:
            model = make_for_one_kernel("llama", 1408)
        model.config.twell = {"tile": 256, "slots": [64, 64, 64]}
        if weights == "fp8":
            round_model(model, SCHEMES["fp8"])
        return model

    @torch.inference_mode()
    def passes(decoder, table):
        ids = torch.arange(1, 101, dtype=torch.int32, device="cuda")[None]
        at = torch.arange(100, dtype=torch.int32, device="cuda")[None]
        yield decoder.run(ids[:, :90], at[:, :90], table)[0]
        yield decoder.run(ids[:, 90:91], at[:, 90:91], table)[0]
        yield decoder.run(ids[:, 91:96], at[:, 91:96], table, last=5)[0]

    tables = torch.tensor([[[1, 2]], [[3, 4]]], dtype=torch.int32, device="cuda")
    known = [
        list(passes(attached(KernelDecoder(opened(), sparse), 5), tables[int(sparse)]))
        for sparse in (False, True)
    ]
    for order in ((False, True), (True, False)):
        model = opened()
        kept = {name: part.clone() for name, part in model.state_dict().items()}
        classes = [type(module) for module in model.modules()]
        decoders = {sparse: KernelDecoder(model, sparse) for sparse in order}
        cache = PagedCache(decoders[True].shapes, 5, model.device)
        for decoder in decoders.values():
            decoder.attach(cache)
        runs = [passes(decoders[sparse], tables[int(sparse)]) for sparse in (False, True)]
        found = list(zip(*zip(*runs, strict=True), strict=True))  # by turns
        for logits, wanted in zip(found, known, strict=True):
            assert all(map(torch.equal, logits, wanted))
        assert [type(module) for module in model.modules()] == classes
        assert all(torch.equal(part, kept[name]) for name, part in model.state_dict().items())


def test_logprobs_and_densities_of_tokens():
    model = make("llama")
    prompts = [torch.randint(1, 1000, (length,)).tolist() for length in LENGTHS]
    scheduler = open_scheduler(
        model, decoder=KernelDecoder(model), max_running=len(prompts), cache_bytes=1 << 28
    )

    def run(*sampling, **more) -> list[list]:
        found = [[] for _ in prompts]
        for events in scheduler.run(prompts, Sampling(NUM_TOKENS, *sampling, **more)):
            for sequence, token in events:
                found[sequence.client].append(token)
        return found

    def ids(rows: list[list]) -> list[list[int]]:
        return [[token.id for token in tokens] for tokens in rows]

    plain, detailed = run(0), run(0, top_logprobs=3, densities=True)
    assert ids(detailed) == ids(plain)
    for token in (token for tokens in detailed for token in tokens[1:]):
        assert token.top[0] == (token.id, token.logprob)
        assert len(token.densities) == 3
        assert all(0.1 < share < 0.9 for share in token.densities)
    drawn = run(0.9, seed=5)
    assert ids(drawn) != ids(plain)
    assert ids(run(0.9, seed=5)) == ids(drawn)
    assert ids(run(0.9, seed=5, top_logprobs=0)) == ids(drawn)  # copied, not written by the step
    assert ids(run(0.9, 0.5, 20, seed=5)) == ids(run(0.9, 0.5, 20, seed=5, densities=True))
