"""Passes over prompts, with plain PyTorch in the place of kernels: short ones are filled up, which
changes nothing."""

import pytest
import torch
from attached import attached
from played_kernels import SIZES, Kernels, stand_in

from twellctl.decoding.kernel_decoder import KernelDecoder
from twellctl.decoding.prompt_graphs import SIZES as FILLED_UP_TO
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
                assert passes._graphs.takes(*given[:2], 1)
                found.append(passes._graphs.run(*given))
            else:
                found.append(passes._run(Prompts.of(*given, 1, CPU)))
            keys = [layer.attend.keys[pages].clone() for layer in decoder._layers]
            found[-1] = (*found[-1], *keys)
        for one, other in zip(*found, strict=True):
            assert one.shape == other.shape
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_what_is_filled_up(tiny):
    decoder = attached(KernelDecoder(tiny(**SIZES, max_position_embeddings=8192)), 100)
    takes = decoder._prompts._graphs.takes
    pages = [*range(1, 90)]
    short, long = padded([(drawn(512), 0, pages)]), padded([(drawn(513), 0, pages)])
    assert max(FILLED_UP_TO) == 512
    assert takes(*short[:2], 1)
    assert not takes(*short[:2], 0)
    assert not takes(*long[:2], 1)
    assert not takes(*padded([(drawn(9), 4090, pages)])[:2], 1)
    assert takes(*padded([(drawn(6), 4090, pages)])[:2], 1)
    assert not takes(*padded([(drawn(9), 0, pages), (drawn(9), 0, pages)])[:2], 1)
