"""Steps over int4 read the head in 8 bits, and choose what the bf16 head chooses."""

import pytest
import torch
from attached import attached
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from twellctl.bench.random_model import round_to_int4
from twellctl.bundle.twell_choice import WayPlan
from twellctl.decoding.batch import Batch
from twellctl.decoding.decoder import Wanted
from twellctl.decoding.engine import Sampling
from twellctl.decoding.kernel_decoder import KernelDecoder
from twellctl.decoding.opening import open_scheduler

pytestmark = pytest.mark.gpu
HEADS = {1536: 12, 2048: 16, 3072: 24, 3584: 28, 4096: 32}  # by hidden size
POSITIONS = 500


def make(K: int, V: int, act: str = "relu") -> PreTrainedModel:
    """A random model in int4. Half of the head's rows have a twin, which differs in the lowest bits
    of three weights, or not at all."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=V,
        hidden_size=K,
        intermediate_size=1408,
        num_hidden_layers=2,
        num_attention_heads=HEADS[K],
        num_key_value_heads=4,
        max_position_embeddings=1024,
        initializer_range=0.03,
        hidden_act=act,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config).eval().to("cuda", torch.bfloat16)
    round_to_int4(model)
    bits = model.lm_head.weight.data.view(torch.int16)
    half = V // 2
    bits[half : 2 * half] = bits[:half]
    bits[half + half // 4 : 2 * half, 70:73] ^= 1
    return model


def logits_of(
    decoder: KernelDecoder, way: str, token: int, position: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Exact ones `[V]`, those for a choice, and rough ones."""
    table = torch.arange(1, 10, device="cuda", dtype=torch.int32)[None]
    tokens = torch.full((1, 1), token, device="cuda", dtype=torch.int32)
    inputs = tokens, torch.full_like(tokens, position), table
    with torch.inference_mode():
        exact, choice, rough = (decoder.ways(1, w)[way](*inputs)[0][0].clone() for w in Wanted)
    return exact, choice, rough


def check(decoder: KernelDecoder, way: str, token: int, position: int) -> tuple[bool, int]:
    """Whether 8 bits would choose another token, and how many logits were computed anew."""
    exact, choice, rough = logits_of(decoder, way, token, position)
    best = exact.argmax()
    assert choice.argmax() == best, position
    is_refined = choice != rough
    assert torch.equal(choice[is_refined], exact[is_refined]), position
    assert choice[best] == exact[best], position
    return bool(rough.argmax() != best), int(is_refined.sum())


@pytest.mark.parametrize("form", ["sparse", "dense", "silu"])
@pytest.mark.parametrize("K", HEADS)
def test_the_choice_is_that_of_the_bf16_head(K, form):
    V = 50001 if form == "sparse" else 4099
    model = make(K, V, "silu" if form == "silu" else "relu")
    decoder = attached(KernelDecoder(model, form == "sparse"), 10)
    assert decoder.step_kind == "int4"
    way = "one kernel" if form == "sparse" else "one dense kernel"
    found = [check(decoder, way, 7 * i % V, i) for i in range(POSITIONS)]
    others, refined = zip(*found, strict=True)
    assert sum(others) > POSITIONS / 20  # which 8 bits alone do not tell apart
    assert 0 < sum(refined) < POSITIONS * V / 20


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite(value):
    model = make(1536, 4099)
    model.lm_head.weight.data[70, 9] = value
    decoder = attached(KernelDecoder(model), 10)
    for where in ("one row of the head", "x"):
        if where == "x":
            model.get_input_embeddings().weight.data[7, 100] = value
        exact, choice, _ = logits_of(decoder, "one kernel", 7, 0)
        best = exact.argmax()
        assert choice.argmax() == best, where
        assert choice[best].isnan() == exact[best].isnan(), where


def test_texts_are_those_of_exact_logits(monkeypatch):
    """Through the engine: greedy rows, and rows that are drawn after them."""
    model = make(1536, 50001)

    def texts() -> list[list[int]]:
        decoder = KernelDecoder(model)
        scheduler = open_scheduler(model, decoder=decoder, cache_bytes=1 << 28)
        decoder.plan = WayPlan.parse("1+ one kernel")  # by what was measured, it may be another
        runs = (scheduler.run([[5, 6, 7]], Sampling(60, t, seed=3)) for t in (0, 0.8, 0))
        return [[token.id for events in run for _, token in events] for run in runs]

    by_rough = texts()
    monkeypatch.setattr(Batch, "_wanted", lambda self, variant, num_tokens: Wanted.EXACT)
    assert texts() == by_rough
