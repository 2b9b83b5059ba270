"""Passes over prompts, with plain PyTorch in the place of kernels: short ones are filled up, which
changes nothing."""

import pytest
import torch
from attached import attached
from played_kernels import SIZES, Kernels, stand_in

from twellctl.decoding.kernel_decoder import KernelDecoder
from twellctl.decoding.prompt_graphs import sizes_of
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


def test_what_is_filled_up():
    pages = [*range(1, 90)]

    def sizes(*parts: tuple[list[int], int], last: int = 1) -> tuple[int, int] | None:
        return sizes_of(padded([(tokens, first, pages) for tokens, first in parts])[1], last)

    assert sizes((drawn(512), 0)) == (512, 16)
    assert sizes((drawn(512), 0), last=0) is None
    assert sizes((drawn(513), 0)) is None
    assert sizes((drawn(1), 0)) == (64, 16)
    assert sizes((drawn(6), 4090)) == (64, 64)
    assert sizes((drawn(9), 4090)) is None
    assert sizes((drawn(9), 0), (drawn(9), 0)) is None
