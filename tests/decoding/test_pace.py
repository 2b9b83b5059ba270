"""How many drafts a round has, and whose, where times and what is kept are drawn."""

import random
from collections import defaultdict

import pytest

from twellctl.decoding.pace import Agreement, Pace
from twellctl.decoding.rounds import Drafts


def a_row() -> dict[int, Agreement]:
    return defaultdict(Agreement)


def paced(
    shares: tuple[float, ...],
    drafts: tuple[float, ...],
    reading: float = 0.02,
    rounds: int = 1500,
    rows: int = 1,
) -> tuple[float, list[Drafts]]:
    """Tokens of a row in the time of a step, and the drafts chosen; of each drafter the share that
    is kept, and the part of a step that one takes, as each further token takes that is read."""
    pace, known, draw = Pace(), [a_row() for _ in range(rows)], random.Random(0)
    tokens, seconds, chosen = 0, 0.0, []
    for _ in range(rounds):
        choice = pace.choose(known, [7] * len(shares))
        took = 1 + choice.num * (drafts[choice.drafter] + reading)
        pace.see(rows, choice, took * draw.uniform(0.98, 1.02))
        for row in known:
            told = (draw.random() < shares[choice.drafter] for _ in range(choice.num))
            kept = next((i for i, is_right in enumerate(told) if not is_right), choice.num)
            pace.agreed(row, choice.drafter, choice.num, kept)
            tokens += 1 + kept
        chosen.append(choice)
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
    rate, _ = paced((share,), (draft,), rows=rows)
    assert rate > 0.93 * best(share, draft + 0.02)


@pytest.mark.parametrize(("share", "draft"), [(0.2, 0.3), (0.9, 1.2), (0.0, 0.1)])
def test_where_drafts_do_not_pay_there_are_none(share, draft):
    rate, chosen = paced((share,), (draft,))
    assert rate > 0.97
    assert chosen[-200:].count(Drafts()) >= 196


@pytest.mark.parametrize(
    ("shares", "drafter"), [((0.98, 0.3), 0), ((0.9, 0.97), 1), ((0.98, 0.98), 1)]
)
def test_the_drafter_that_gives_more_is_asked(shares, drafter):
    rate, chosen = paced(shares, (0.3, 0.0))
    asked = [choice.drafter for choice in chosen[-200:] if choice.num]
    assert asked.count(drafter) > 180
    assert rate > 0.93 * max(best(shares[0], 0.32), best(shares[1], 0.02))


def test_what_changes_is_noticed():
    """Drafts that begin to be kept, and others that end to be."""
    pace, row = Pace(), a_row()
    for share, least, most in ((0, 0, 30), (1, 600, 900), (0, 0, 60)):
        drafted = 0
        for _ in range(900):
            choice = pace.choose([row], [7])
            pace.see(1, choice, 1 + 0.2 * choice.num)
            pace.agreed(row, 0, choice.num, share * choice.num)
            drafted += choice.num > 0
        assert least <= drafted <= most


def test_drafts_may_be_fixed():
    assert Pace(Drafts(5, 1)).choose([a_row()], [7, 7]) == Drafts(5, 1)
    assert Pace(Drafts(5)).choose([a_row()], [3]) == Drafts(3)
    assert Pace(Drafts(5)).choose([a_row()], []) == Drafts()
    assert Pace(Drafts()).choose([a_row()], [7]) == Drafts()
    for most in ([], [0], [0, 0]):
        assert Pace().choose([a_row()], most) == Drafts()
