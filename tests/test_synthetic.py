"""Synthetic inputs of an FFN are what they claim."""

import pytest
import torch
import torch.nn.functional as F

from twellctl.firing.synthetic import make_rows, make_weights


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("density", [0.005, 0.05, 0.3, 1])
def test_an_even_density_is_the_one_asked_for(density, bias):
    numbers = {"dtype": torch.float32, "generator": torch.Generator().manual_seed(1)}
    w_gate, _, _, b_gate, _, _ = make_weights(512, 1024, density, bias=bias, **numbers).split
    fired = F.linear(make_rows(512, 512, **numbers), w_gate, b_gate) > 0
    assert float(fired.float().mean()) == pytest.approx(density, rel=0.06)
