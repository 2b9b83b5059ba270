"""How many drafts a round has, and whose, where times and what is kept are drawn."""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain

import pytest

from twellctl.decoding.pace import Agreement, Pace
from twellctl.decoding.rounds import Drafts


def a_row() -> dict[int, Agreement]:
    return defaultdict(Agreement)


def kept_of(chances: Sequence[float], draw: random.Random) -> int:
    """Drafts that are kept: up to the first of them that is not."""
    return next((i for i, chance in enumerate(chances) if draw.random() >= chance), len(chances))


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
            kept = kept_of([shares[choice.drafter]] * choice.num, draw)
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


# ---- round times of a real 1.5B on an H200, drafts whose chances fall with their depth ----

Text = list[tuple[float, list[float]]]  # stretches in turn: mean length, chances by depth

CODE: Text = [(math.inf, [0.97 - 0.004 * depth for depth in range(7)])]
EASY, HARD = ([0.985 - 0.005 * depth for depth in range(7)], [0.9 - 0.07 * i for i in range(7)])
CHAT: Text = [(40, EASY), (20, HARD)]
LONG_CHAT: Text = [(200, EASY), (100, HARD)]
CLIFF: Text = [(math.inf, [0.94, 0.97, 0.97, 0.98, 0.98, 0.5, 0.5])]  # 7 slower than 5, as measured
HOPELESS: Text = [(math.inf, [0.3] * 7)]


def milliseconds(drafts: int) -> float:
    """Of a round: the host, the steps of the drafts and the pass over all, or the plain step."""
    return 0.1 + 0.56 * drafts + 1.25


def answer(
    text: Text,
    draw: random.Random,
    choose: Callable[[], int],
    see: Callable[[int, int], None] = lambda drafts, kept: None,
) -> tuple[int, float]:
    """Tokens of an answer (128 or a few more), and milliseconds that its rounds took."""
    tokens, took, turn, stretch_ends = 0, 0.0, 0, 0.0
    while tokens < 128:
        if tokens >= stretch_ends:
            length, chances = text[turn % len(text)]
            stretch_ends, turn = tokens + length * draw.expovariate(1), turn + 1
        drafts = choose()
        kept = kept_of(chances[:drafts], draw)
        see(drafts, kept)
        tokens, took = tokens + 1 + kept, took + milliseconds(drafts)
    return tokens, took


def rate(answers: Sequence[tuple[int, float]]) -> float:
    tokens, took = zip(*answers, strict=True)
    return sum(tokens) / sum(took)


def best_fixed(text: Text) -> float:
    """Tokens a millisecond with the best number of drafts, the same for all rounds."""
    draw = random.Random(1)
    counts = (0, 1, 2, 3, 5, 7)
    return max(rate([answer(text, draw, lambda k=k: k) for _ in range(200)]) for k in counts)


def answered(texts: Sequence[Text], seed: int = 0) -> list[tuple[int, float]]:
    """An answer of each, by one engine, one after another."""
    pace, draw, found = Pace(), random.Random(seed), []
    for text in texts:
        row = a_row()

        def see(drafts: int, kept: int, row=row) -> None:
            seconds = milliseconds(drafts) * draw.uniform(0.98, 1.02) / 1000
            pace.see(1, Drafts(drafts), seconds)
            pace.agreed(row, 0, drafts, kept)

        found.append(answer(text, draw, lambda row=row: pace.choose([row], [7]).num, see))
    return found


@pytest.mark.parametrize("text", [CODE, CHAT, LONG_CHAT, CLIFF, HOPELESS])
def test_the_choice_is_near_the_best_fixed_count(text):
    assert rate(answered([text] * 60)) > 0.97 * best_fixed(text)


def test_texts_in_turn_have_near_the_best_of_each():
    texts = (CODE, CHAT, CLIFF)
    answers = answered(texts * 40)
    for i, text in enumerate(texts):
        assert rate(answers[i :: len(texts)]) > 0.96 * best_fixed(text)


@pytest.mark.parametrize("number", [1, 60])
def test_drafts_that_never_pay_cost_little(number):
    """In the first answers of an engine, too."""
    engines = (answered([HOPELESS] * number, seed) for seed in range(60 // number))
    assert rate(list(chain.from_iterable(engines))) * milliseconds(0) > 0.97
