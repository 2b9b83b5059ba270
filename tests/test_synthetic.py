"""Synthetic inputs of an FFN are what they claim."""

import pytest
import torch

from twellctl.errors import TwellError
from twellctl.firing.counts import Union, UnionCount
from twellctl.firing.synthetic import (
    FfnWeights,
    Spread,
    check_union,
    make_rows,
    make_weights,
    measure_firing,
)


def made(density: float, spread: Spread, *, bias: bool = False, M: int = 512):
    generator = torch.Generator().manual_seed(1)
    numbers = {"dtype": torch.float32, "generator": generator}
    weights = make_weights(512, 1024, density, bias=bias, **numbers)
    return make_rows(M, 512, density, spread, **numbers), weights


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("density", [0.005, 0.01, 0.05, 0.3])
def test_an_even_density_is_the_one_asked_for(density, bias):
    x, weights = made(density, Spread(), bias=bias)
    found = measure_firing(x, weights)
    assert found["density"] == pytest.approx(density, rel=0.06)
    assert found["union"]["tokens"] == 128


def test_all_rows_can_be_full():
    found = measure_firing(*made(1, Spread(), bias=True))
    assert (found["density"], found["nnz_p50"], found["slots"]) == (1, 1024, 256)


def test_a_lognormal_spread_keeps_the_mean():
    found = measure_firing(*made(0.02, Spread("lognormal"), M=4096))
    assert found["density"] == pytest.approx(0.02, rel=0.1)
    assert found["nnz_p99"] > 4 * found["nnz_p50"]


def test_heavy_rows_are_as_many_and_as_heavy_as_asked_for():
    x, weights = made(0.01, Spread("heavy", heavy_rows=0.1, heavy_density=0.5), M=1000)
    densities = ((x @ weights.gate_up[:1024].T) > 0).float().mean(-1)
    heavy = densities > 0.3
    assert int(heavy.sum()) == 100
    assert float(densities[heavy].mean()) == pytest.approx(0.5, rel=0.05)
    assert float(densities[~heavy].mean()) == pytest.approx(0.01, rel=0.06)


def test_copies_hold_the_same_numbers_elsewhere():
    _, weights = made(0.1, Spread(), bias=True)
    for ours, copied in zip(weights.split, weights.copy().split, strict=True):
        assert torch.equal(ours, copied)
        assert ours.data_ptr() != copied.data_ptr()
        assert ours.is_contiguous()


def test_the_union_is_counted_over_neighbours():
    fired = torch.zeros(300, 1000)
    fired[:128, :5] = 1  # the same neurons for each of them
    for token in range(128, 256):
        fired[token, token] = 1  # another one for each
    count = UnionCount()
    for part in (fired[:256], fired[256:]):  # what is no whole window is left out
        count.add(part)
    assert count.summary(0.005) == Union(128, pytest.approx((5 + 128) / 2000), 1 - 0.995**128)


def test_weights_that_share_neurons_between_tokens_are_refused():
    check_union(Union(128, 0.4510, 0.4736))
    with pytest.raises(TwellError, match=r"fire only 44\.9% of the neurons over 128 consecutive"):
        check_union(Union(128, 0.4490, 0.4736))
    x, weights = made(0.01, Spread())
    with pytest.raises(TwellError, match="another --seed or --density, or a real model"):
        measure_firing(x[:1].expand(512, -1), weights)
    skewed = FfnWeights(weights.gate_up.clone(), weights.down)
    skewed.gate_up[: 1024 // 8, 0] += 1.5  # an eighth of the neurons does most of the firing
    with pytest.raises(TwellError, match="another --seed or --density, or a real model"):
        measure_firing(x, skewed)
