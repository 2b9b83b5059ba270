"""How many drafts a round has, where times and what is kept are drawn."""

import random

import pytest

from twellctl.decoding.pace import Agreement, Pace


def paced(
    share: float, draft: float, reading: float = 0.02, rounds: int = 1500, rows: int = 1
) -> tuple[float, list[int]]:
    """Tokens of a row in the time of a step, and the numbers of drafts chosen, where a draft takes
    so much of a step, and so does each further token that is read; of drafts a `share` is kept."""
    pace, known, draw = Pace(), [Agreement() for _ in range(rows)], random.Random(0)
    tokens, seconds, chosen = 0, 0.0, []
    for _ in range(rounds):
        count = pace.choose(known, 7)
        took = 1 + count * (draft + reading)
        pace.see(rows, count, took * draw.uniform(0.98, 1.02))
        for row in known:
            kept = next((i for i in range(count) if draw.random() > share), count)
            pace.agreed(row, count, kept)
            tokens += 1 + kept
        chosen.append(count)
        seconds += took
    return tokens / seconds / rows, chosen


def best(share: float, cost: float) -> float:
    """Tokens in the time of a step, with the best number of drafts of 0 to 7."""
    return max(sum(share**i for i in range(k + 1)) / (1 + k * cost) for k in range(8))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(
    ("share", "draft"), [(0.985, 0.23), (0.985, 0.05), (0.97, 0.3), (0.9, 0.3), (0.8, 0.4)]
)
def test_drafts_are_as_many_as_pay(share, draft, rows):
    rate, _ = paced(share, draft, rows=rows)
    assert rate > 0.93 * best(share, draft + 0.02)


@pytest.mark.parametrize(("share", "draft"), [(0.2, 0.3), (0.9, 1.2), (0.0, 0.1)])
def test_where_drafts_do_not_pay_there_are_none(share, draft):
    rate, chosen = paced(share, draft)
    assert rate > 0.97
    assert chosen[-200:].count(0) >= 196


def test_what_changes_is_noticed():
    """Drafts that begin to be kept, and others that end to be."""
    pace, row = Pace(), Agreement()
    for share, least, most in ((0, 0, 30), (1, 600, 900), (0, 0, 60)):
        drafted = 0
        for _ in range(900):
            count = pace.choose([row], 7)
            pace.see(1, count, 1 + 0.2 * count)
            pace.agreed(row, count, share * count)
            drafted += count > 0
        assert least <= drafted <= most


def test_a_number_may_be_fixed():
    assert Pace(5).choose([Agreement()], 7) == 5
    assert Pace(5).choose([Agreement()], 3) == 3
    assert Pace(0).choose([Agreement()], 7) == 0
    assert Pace().choose([Agreement()], 0) == 0
