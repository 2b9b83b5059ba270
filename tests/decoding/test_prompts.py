"""Passes over prompts, with plain PyTorch in the place of kernels: chunks are filled up, which
changes nothing."""

from itertools import pairwise

import pytest
import torch
from attached import attached
from compiled import EVERY_CASE
from played_kernels import SIZES, Kernels, stand_in

from twellctl.decoding.kernel_decoder import KernelDecoder
from twellctl.decoding.prompt_graphs import SIZES as FILLED_UP
from twellctl.decoding.prompt_graphs import WIDTHS, sizes_of
from twellctl.decoding.prompts import Prompts
from twellctl.decoding.torch_decoder import padded

CPU = torch.device("cpu")
FAMILIES = {
    "llama": {},
    "qwen3": {"head_dim": 36},
    "gemma2": {"hidden_activation": "relu", "attn_logit_softcapping": 5.0, "head_dim": 256},
    "mistral": {"sliding_window": 40},
}


@pytest.fixture(autouse=True)
def kernels(monkeypatch) -> Kernels:
    return stand_in(monkeypatch)


def drawn(count: int) -> list[int]:
    return torch.randint(1, 500, (count,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_prompt_that_is_filled_up_says_what_it_says(tiny, family):
    """From its beginning, and behind what is cached."""
    decoder = attached(KernelDecoder(tiny(family, **SIZES | FAMILIES[family])), 17)
    passes, pages = decoder._prompts, [3, 1, 9, 4, 7, 12]
    for first, count in ((0, 1), (0, 5), (0, 64), (7, 60), (100, 65), (0, 256)):
        text = drawn(first + count)
        found = []
        for filled_up in (True, False):
            if first:
                decoder.run(*padded([(text[:first], 0, pages)]), last=0)
            given = padded([(text[first:], first, pages)])
            if filled_up:
                assert sizes_of(given[1], 1) is not None
                found.append(passes.run(*given, 1))
            else:
                found.append(passes._run(Prompts.of(*given, 1, CPU)))
            keys = [layer.attend.keys[pages].clone() for layer in decoder._layers]
            found[-1] = (*found[-1], *keys)
        for one, other in zip(*found, strict=True):
            assert one.shape == other.shape
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES if EVERY_CASE else ["qwen3", "mistral"])
@torch.inference_mode()
def test_chunks_and_a_rest_say_what_the_model_says(tiny, family):
    """Chunks give no logits; a prompt begins a second time over what the first one has left."""
    model = tiny(family, **SIZES | FAMILIES[family], max_position_embeddings=2560)
    decoder = attached(KernelDecoder(model), 41)
    chunk, pages = decoder.prefill_chunk, [*range(40, 0, -1)]
    for count in (2 * chunk + 52, chunk + 700):
        text = drawn(count)
        for first in range(0, count, chunk):
            part = text[first : first + chunk]
            last = int(first + chunk >= count)
            given = padded([(part, first, pages)])
            assert sizes_of(given[1], last) is not None
            logits, fired = decoder.run(*given, last=last)
            assert logits.shape == (1, last, decoder.vocab_size)
            assert fired.shape == (len(decoder.neurons), 1, last)
        known = model(torch.tensor([text])).logits[:, -1:]
        torch.testing.assert_close(logits, known, rtol=1e-4, atol=1e-4)


def test_what_is_filled_up():
    pages = [*range(1, 200)]

    def sizes(*parts: tuple[int, int], last: int = 1) -> tuple[int, int, int] | None:
        rows = [(drawn(count), first, pages) for count, first in parts]
        return sizes_of(padded(rows)[1], last)

    assert sizes((1, 0)) == (64, 16, 1)
    assert sizes((512, 0)) == (512, 16, 1)
    assert sizes((512, 0), last=0) == (512, 16, 0)
    assert sizes((513, 0)) == (640, 16, 1)
    assert sizes((1024, 0), last=0) == (1024, 16, 0)
    assert sizes((1025, 0)) is None
    assert sizes((1024, 1024), last=0) == (1024, 64, 0)
    assert sizes((6, 4090)) == (64, 64, 1)
    assert sizes((9, 4090)) == (64, 128, 1)
    assert sizes((9, 8190)) is None
    assert sizes((9, 0), last=2) is None
    assert sizes((9, 0), (9, 0)) is None


def test_large_prompts_are_filled_up_by_a_quarter_at_most():
    assert KernelDecoder.prefill_chunk == FILLED_UP[-1]  # a whole chunk by nothing
    assert list(WIDTHS) == sorted(WIDTHS)
    large = [size for size in FILLED_UP if size >= 512]
    assert all(size < more <= 1.25 * size for size, more in pairwise(large))
