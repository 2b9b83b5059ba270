"""Synthetic inputs of an FFN are what they claim."""

import pytest
import torch
import torch.nn.functional as F
from uneven_rows import make_uneven

from twellctl.firing.synthetic import make_rows, make_weights


def made(density: float, spread: str = "even", *, bias: bool = False, M: int = 512):
    """Weights, and which neurons fire for rows."""
    generator = torch.Generator().manual_seed(1)
    numbers = {"dtype": torch.float32, "generator": generator}
    weights = make_weights(512, 1024, density, bias=bias, **numbers)
    x = make_rows(M, 512, **numbers)
    make_uneven(x, density, spread, generator, share=0.1)
    w_gate, _, _, b_gate, _, _ = weights.split
    return weights, (F.linear(x, w_gate, b_gate) > 0).float()


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("density", [0.005, 0.05, 0.3, 1])
def test_an_even_density_is_the_one_asked_for(density, bias):
    _, fired = made(density, bias=bias)
    assert float(fired.mean()) == pytest.approx(density, rel=0.06)


def test_a_lognormal_spread_keeps_the_mean():
    shares = made(0.02, "lognormal", M=4096)[1].mean(-1)
    assert float(shares.mean()) == pytest.approx(0.02, rel=0.1)
    assert shares.quantile(0.99) > 4 * shares.median()


def test_heavy_rows_are_as_many_and_as_heavy_as_asked_for():
    shares = made(0.01, "heavy", M=1000)[1].mean(-1)
    heavy = shares > 0.3
    assert int(heavy.sum()) == 100
    assert float(shares[heavy].mean()) == pytest.approx(0.5, rel=0.05)
    assert float(shares[~heavy].mean()) == pytest.approx(0.01, rel=0.06)
