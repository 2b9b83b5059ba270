"""Passes over prompts on a GPU: what they say, and that a graph says the same."""

import copy

import pytest
import torch
from attached import attached
from kernel_models import FAMILIES, make
from packed_models import packed
from transformers import AutoConfig, AutoModelForCausalLM

from twellctl.decoding.coded_decoder import CodedDecoder
from twellctl.decoding.kernel_decoder import KernelDecoder
from twellctl.decoding.prompt_graphs import sizes_of
from twellctl.decoding.prompts import Prompts
from twellctl.decoding.torch_decoder import padded

pytestmark = pytest.mark.gpu
PAGES = [5, 2, 9, 11, 3, 1, 8, 20, 17, 4]


def drawn(count: int) -> list[int]:
    return torch.randint(1, 1000, (count,)).tolist()


def coded() -> CodedDecoder:
    torch.manual_seed(0)
    sizes = {"hidden_size": 1536, "intermediate_size": 1408, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 1000}
    config = AutoConfig.for_model("qwen2", **sizes, **heads, max_position_embeddings=2048)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().cuda()
    return CodedDecoder(packed(model))


def opened(kind: str) -> KernelDecoder | CodedDecoder:
    if kind == "codes":
        return attached(coded(), 24)
    family, _, form = kind.partition(", ")
    settings = FAMILIES[family] | ({"hidden_act": "silu"} if form == "silu" else {})
    model = make(family, settings)
    return attached(KernelDecoder(model, sparse=form != "dense", stable=form == "silu"), 24)


KINDS = ["codes", "llama, sparse", "llama, dense", "qwen3, silu", "mistral, silu", "gemma2, dense"]


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_graph_says_what_was_said_without(kind):
    """The second pass of a size is captured, others behind it are replayed."""
    decoder = opened(kind)
    graphs, stream = decoder._prompts._graphs, torch.cuda.Stream()
    for length in (3, 64, 65, 300):
        texts = [drawn(length) for _ in range(3)]
        found: list[list[torch.Tensor]] = [[], []]
        for again in range(2):
            for text in texts:
                given = padded([(text, 0, PAGES)])
                assert sizes_of(given[1], 1) is not None
                with torch.cuda.stream(stream):
                    logits, fired = decoder.run(*given)
                found[again] += [logits, fired]
        torch.cuda.synchronize()
        assert all(map(torch.equal, *found))
        assert found[0][0].isfinite().all()
    captured = [known.graph is not None for known in graphs._known.values()]
    capped = kind != "codes" and any(layer.attend.cap for layer in decoder._layers)
    assert captured == [not capped] * 3


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_what_fills_up_changes_nothing(kind):
    """But the order of sums: behind what is cached, too."""
    decoder = opened(kind)
    passes = decoder._prompts
    for first, count in ((0, 2), (0, 200), (130, 50)):
        text = drawn(first + count)
        found = []
        for filled_up in (True, False):
            if first:
                decoder.run(*padded([(text[:first], 0, PAGES)]), last=0)
            given = padded([(text[first:], first, PAGES)])
            run = passes.run(*given, 1) if filled_up else passes._run(_not_filled_up(given))
            found.append(run)
        (one, fired), (other, others) = found
        assert (one - other).abs().max() < 0.1 * other.std(), (first, count)
        assert (fired - others).abs().max() <= 12 if fired.numel() else fired.shape == others.shape


def _not_filled_up(given: tuple[torch.Tensor, ...]) -> Prompts:
    return Prompts.of(*given, 1, torch.device("cuda"))


@torch.inference_mode()
def test_prompts_say_what_the_model_says():
    """Several of different lengths together, and one by one: they err as the model's own forward in
    bf16 does."""
    for family in ("llama", "qwen3", "mistral"):
        model = make(family)
        judge = copy.deepcopy(model).double()
        decoder = attached(KernelDecoder(model), 24)
        texts = [drawn(length) for length in (130, 7, 64)]
        rows = [*zip(texts, (0, 0, 0), (PAGES[:3], [14], [15]), strict=True)]
        together = decoder.run(*padded(rows))[0][:, 0]
        for row, text, logits in zip(rows, texts, together, strict=True):
            alone = decoder.run(*padded([row]))[0][0, 0]
            ids = torch.tensor([text], device="cuda")
            wanted, usual = judge(ids).logits[0, -1], model(ids).logits[0, -1]
            for found in (logits, alone):
                assert (found - wanted).abs().mean() < 1.5 * (usual - wanted).abs().mean(), family
