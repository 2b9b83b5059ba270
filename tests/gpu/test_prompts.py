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
PAGES = [5, 2, 9, 11, 3, 1, 8, 20, 17, 4, 13, 22, 6, 19, 10, 7, 23, 12, 15, 21, 14]


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
        decoder = coded()
    else:
        family, _, form = kind.partition(", ")
        settings = FAMILIES[family] | ({"hidden_act": "silu"} if form == "silu" else {})
        how = {"sparse": form != "dense", "stable": form == "silu"}
        decoder = KernelDecoder(make(family, settings), **how)
    decoder = attached(decoder, 24)
    torch.cuda.synchronize()  # tests run it on another stream
    return decoder


KINDS = ["codes", "llama, sparse", "llama, dense", "qwen3, silu", "mistral, silu", "gemma2, dense"]


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_graph_says_what_was_said_without(kind):
    """The second pass of a size is captured, others behind it are replayed."""
    decoder = opened(kind)
    stream = torch.cuda.Stream()
    for length in (3, 64, 65, 300, 700, 1000):
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
    assert captured(decoder) == [not is_capped(decoder)] * 5


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_chunks_and_a_rest_as_graphs(kind):
    """The same text over and over: the same bits are cached, and said, from graphs as without."""
    decoder = opened(kind)
    stream, layers = torch.cuda.Stream(), decoder._prompts._layers
    text, found = drawn(1300), []
    for _ in range(4):
        with torch.cuda.stream(stream):
            nothing, none_fired = decoder.run(*padded([(text[:1024], 0, PAGES)]), last=0)
            logits, fired = decoder.run(*padded([(text[1024:], 1024, PAGES)]))
            keys = [layer.attend.keys[PAGES].clone() for _, layer, *_ in layers]
            values = [layer.attend.values[PAGES].clone() for _, layer, *_ in layers]
        assert nothing.shape == (1, 0, decoder.vocab_size)
        assert none_fired.shape == (*fired.shape[:2], 0)
        found.append([logits, fired, *keys, *values])
    torch.cuda.synchronize()
    assert found[0][0].isfinite().all()
    for again in found[1:]:
        assert all(map(torch.equal, found[0], again))
    assert captured(decoder) == [not is_capped(decoder)] * 2


def captured(decoder: KernelDecoder | CodedDecoder) -> list[bool]:
    """Of each size that was run."""
    return [known.graph is not None for known in decoder._prompts._graphs._known.values()]


def is_capped(decoder: KernelDecoder | CodedDecoder) -> bool:
    """Whether attention caps its scores, as no graph can hold it."""
    return any(layer.attend.cap for _, layer, *_ in decoder._prompts._layers)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_what_fills_up_changes_nothing(kind):
    """But the order of sums: behind what is cached, too."""
    decoder = opened(kind)
    passes = decoder._prompts
    for first, count in ((0, 2), (0, 200), (130, 50), (0, 600), (1024, 200)):
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
    """Several of different lengths together, and one by one; one in two chunks: they err as the
    model's own forward in bf16 does."""
    for family in ("llama", "qwen3", "mistral"):
        model = make(family)
        judge = copy.deepcopy(model).double()
        decoder = attached(KernelDecoder(model), 24)
        texts = [drawn(length) for length in (130, 7, 64)]
        rows = [*zip(texts, (0, 0, 0), (PAGES[:3], [14], [15]), strict=True)]
        together = decoder.run(*padded(rows))[0][:, 0]
        for row, text, logits in zip(rows, texts, together, strict=True):
            alone = decoder.run(*padded([row]))[0][0, 0]
            check(model, judge, text, logits, alone)
        text = drawn(1300)
        decoder.run(*padded([(text[:1024], 0, PAGES)]), last=0)
        check(model, judge, text, decoder.run(*padded([(text[1024:], 1024, PAGES)]))[0][0, 0])


def check(model, judge, text: list[int], *logits: torch.Tensor) -> None:
    """That the `logits` `[V]` behind `text` err as those of the model."""
    ids = torch.tensor([text], device="cuda")
    wanted, usual = judge(ids).logits[0, -1], model(ids).logits[0, -1]
    for found in logits:
        assert (found - wanted).abs().mean() < 1.5 * (usual - wanted).abs().mean(), len(text)
