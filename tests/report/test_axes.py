"""Axes: where values lie, and what is written beside them."""

import pytest

from twellctl.report import charts
from twellctl.report.axes import number_axis, percent, share_axis


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0 %"), (1, "100.0 %"), (0.1234, "12.3 %"), (0.0123, "1.23 %"), (0.00123, "0.123 %")],
)
def test_percent(share, text):
    assert percent(share) == text


def test_shares_lie_between_whole_decades():
    axis = share_axis([0.0, 0.003, 0.04])
    assert axis.ticks == pytest.approx((0.001, 0.01, 0.1))
    assert [axis.spelled(tick) for tick in axis.ticks] == ["0.1 %", "1 %", "10 %"]
    assert (axis.at(0), axis.at(0.001), axis.at(0.1), axis.at(1)) == pytest.approx((0, 0, 1, 1))
    assert axis.at(0.01) == pytest.approx(0.5)


@pytest.mark.parametrize("shares", [[], [0.0], [1.0], [1e-9], [0.01], [0.1, 0.1]])
def test_any_shares_make_an_axis(shares):
    axis = share_axis(shares)
    assert 1e-5 <= axis.low < axis.high <= 1


def test_numbers_lie_between_round_ones():
    assert number_axis([2.9, 3.4]).ticks == (2.8, 3.0, 3.2, 3.4)
    assert number_axis([0.7, 1.9], zero=True).ticks == (0, 0.5, 1, 1.5, 2)
    assert number_axis([-1e-9, 1.0]).ticks[0] == 0  # what rounding left draws no axis below 0


@pytest.mark.parametrize("values", [[], [0.0], [5.0], [3.0, 3.0], [-2.0, 7.0], [1e-30, 2e-30]])
def test_any_numbers_make_an_axis(values):
    for zero in (False, True):
        axis = number_axis(values, zero=zero)
        assert axis.low < axis.high
        assert all(0 <= axis.at(value) <= 1 for value in values)


@pytest.mark.parametrize("count", [1, 2, 7, 32, 80])
def test_names_have_room(count):
    for names in (None, [f"{n}-{2 * n}" for n in range(count)], ["a very long name"] * count):
        found = charts.places(count, names)
        assert found
        assert sum(len(text) + 2 for _, text in found) <= charts.ROOM + 14
        assert all(0 < at < 1 for at, _ in found)
