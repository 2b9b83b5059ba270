"""Rounding of weights to 4 bits: to the nearest, and by the sums of what a layer reads."""

import pytest
import torch

from twellctl.fitting.grid import CLIP, Codes, Grid, nearest_outputs
from twellctl.fitting.least_squares import NotSolved, Products

GRID = Grid(8, torch.float32)


def drawn(rows=6, inputs=32, tokens=400):
    """(weight, inputs that depend on each other `[T, K]`)."""
    mixed = torch.randn(tokens, inputs) @ torch.randn(inputs, inputs)
    return torch.randn(rows, inputs), mixed


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_a_number_is_off_by_half_a_step_at_most_but_for_those_that_are_clipped():
    weight = torch.randn(50, 64)
    rounded = GRID.nearest(weight)
    groups, found = (t.unflatten(-1, (-1, 8)) for t in (weight, rounded.weight))
    step = rounded.scales.abs()[..., None]
    inside = (groups / rounded.scales[..., None]).clamp(-8, 7) * rounded.scales[..., None]
    assert ((found - inside).abs() <= step / 2 + 1e-6).all()
    assert rounded.codes.min() == -8
    assert rounded.codes.max() == 7
    torch.testing.assert_close(GRID.rounded(weight), rounded.weight)


def test_the_number_farthest_from_zero_has_the_first_code_whatever_its_sign():
    weight = torch.tensor([[1.0, 0.5, 0, 0, 0, 0, 0, 0], [-1.0, 0.5, 0, 0, 0, 0, 0, 0]])
    rounded = GRID.nearest(weight)
    assert rounded.codes[:, 0].tolist() == [-8, -8]
    assert rounded.scales.flatten().tolist() == pytest.approx([-CLIP / 8, CLIP / 8])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zeros_stay_zeros(dtype):
    grid = Grid(8, dtype)
    weight = torch.cat([torch.zeros(2, 8), torch.randn(2, 8)], 1)
    assert (grid.nearest(weight).weight[:, :8] == 0).all()
    assert (grid.by_sums(weight, torch.eye(16), 1e-3).weight[:, :8] == 0).all()


def test_by_sums_outputs_are_nearer_than_by_nearest_numbers():
    weight, inputs = drawn()
    gram = inputs.T @ inputs
    found = GRID.by_sums(weight, gram, 1e-4), GRID.nearest(weight)
    errors = [float((inputs @ (weight - one.weight).T).square().sum()) for one in found]
    assert errors[0] < 0.6 * errors[1]


@pytest.mark.parametrize("size", [8, 24, 240])
def test_by_sums_of_inputs_that_know_nothing_of_each_other_it_is_the_nearest(size):
    weight, grid = torch.randn(5, 480), Grid(size, torch.float32)
    one, other = grid.by_sums(weight, torch.eye(480), 1e-3), grid.nearest(weight)
    assert torch.equal(one.codes, other.codes)
    assert torch.equal(one.scales, other.scales)


@pytest.mark.parametrize("at_once", [8, 16, 128])
def test_how_many_inputs_are_passed_on_together_changes_nothing(monkeypatch, at_once):
    weight, inputs = drawn()
    gram = inputs.T @ inputs
    expected = GRID.by_sums(weight, gram, 1e-3)
    monkeypatch.setattr("twellctl.fitting.grid.AT_ONCE", at_once)
    found = GRID.by_sums(weight, gram, 1e-3)
    assert (found.codes != expected.codes).float().mean() < 0.02  # ties that sums decide


def test_inputs_that_are_always_zero_are_no_matter():
    weight, inputs = drawn()
    inputs[:, 3] = 0
    found = GRID.by_sums(weight, inputs.T @ inputs, 1e-4)
    assert found.weight.isfinite().all()


def test_sums_that_are_not_finite_are_an_error():
    with pytest.raises(NotSolved, match="cannot be rounded"):
        GRID.by_sums(torch.randn(2, 8), torch.full((8, 8), torch.nan), 1e-3)


def test_outputs_are_those_wanted_and_not_those_of_the_weight():
    """A layer that reads what is broken gives what the original gave, as far as it can."""
    weight, inputs = drawn(tokens=2000)
    broken = inputs + 0.3 * torch.randn_like(inputs).cumsum(1)
    products = Products(32, 6, weight.device)
    wanted = inputs @ weight.T
    products.add(broken.T, (wanted - broken @ weight.T).T)
    products.over_processes()
    grid = Grid(8, torch.bfloat16)
    found = nearest_outputs(weight, products, grid)
    errors = [
        float((wanted - broken @ one.T).square().mean())
        for one in (found.weight, grid.by_sums(weight, products.gram, 1e-4).weight)
    ]
    assert errors[0] < 0.9 * errors[1]


def test_codes_are_joined_by_rows():
    one, other = GRID.nearest(torch.randn(2, 16)), GRID.nearest(torch.randn(1, 16))
    both = Codes.joined(one, other.expanded(3))
    assert torch.equal(both.weight, torch.cat([one.weight, other.weight.expand(3, -1)]))
