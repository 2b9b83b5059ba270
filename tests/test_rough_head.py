"""The LM head in 8 bits: where its codes lie, and errors that are not below what rounding loses."""

import pytest
import torch
from torch import Tensor

from twellctl.decoding.rough_head import MOST_CODE, RoughHead, laid, rounded

SIZES = [1.0, 1e-30, 1e30, 1e-45]


def drawn(V: int, K: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(V, K, generator=generator).bfloat16()


@pytest.mark.parametrize("size", SIZES)
def test_a_row_is_near_to_its_codes_times_its_scale(size):
    rows = (drawn(40, 1536).float() * size).bfloat16()
    rows[3] = 0
    rows[4, 1:] = 0
    codes, scales = rounded(rows)
    assert codes.abs().max() <= MOST_CODE
    lost = (rows.double() - codes * scales[:, :1].double()).norm(dim=1)
    assert (lost <= scales[:, 1]).all()
    if size in (1.0, 1e30):
        assert (codes.abs().amax(1) == MOST_CODE).sum() == 39
        assert (scales[:, 1] < 0.02 * rows.double().norm(dim=1) + 1e-17).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_of_a_row_that_is_not_finite_nothing_is_known(value):
    rows = drawn(6, 1536)
    rows[4, 7] = value
    codes, scales = rounded(rows)
    assert scales[:, 1].isinf().tolist() == [False] * 4 + [True, False]
    assert (codes[4] * scales[4, 0] == 0).all()


@pytest.mark.parametrize("V", [1, 4098, 8192])
def test_a_head_is_filled_up(V):
    head = drawn(V, 128)
    made = RoughHead.of(head)
    rows = (V + 3) // 4 * 4
    assert (made.codes.shape, made.scales.shape) == ((rows, 128), (rows, 2))
    codes, scales = rounded(head)
    assert torch.equal(made.scales[:V], scales)
    assert (made.scales[V:, 0] == 0).all()
    assert (made.scales[V:, 1] == torch.inf).all()
    assert torch.equal(made.codes[:V].sort(1).values, codes.sort(1).values)


def test_where_a_code_lies():
    """As step_head.cuh says: blocks of 64 by the row, of eight columns the even ones first."""
    codes = torch.zeros(4, 256, dtype=torch.int8)
    codes[2, 64 * 3 + 13], codes[3, 64 * 2 + 8 * 3 + 2] = 5, -7
    placed = laid(codes)
    assert (placed[2, 64 * 3 + 8 + 6], placed[3, 64 * 3 + 8 * 3 + 1]) == (5, -7)
    assert placed.count_nonzero() == 2
