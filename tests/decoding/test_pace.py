"""How many drafts a round has, and whose, where times and what is kept are drawn."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import pytest

from twellctl.decoding.chances import Standing
from twellctl.decoding.pace import Pace
from twellctl.decoding.rounds import Drafts


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
    pace, known, draw = Pace(), [Standing() for _ in range(rows)], random.Random(0)
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
    pace, row = Pace(), Standing()
    for share, least, most in ((0, 0, 30), (1, 600, 900), (0, 0, 60)):
        drafted = 0
        for _ in range(900):
            choice = pace.choose([row], [7])
            pace.see(1, choice, 1 + 0.2 * choice.num)
            pace.agreed(row, 0, choice.num, share * choice.num)
            drafted += choice.num > 0
        assert least <= drafted <= most


def test_drafts_may_be_fixed():
    assert Pace(Drafts(5, 1)).choose([Standing()], [7, 7]) == Drafts(5, 1)
    assert Pace(Drafts(5)).choose([Standing()], [3]) == Drafts(3)
    assert Pace(Drafts(5)).choose([Standing()], []) == Drafts()
    assert Pace(Drafts()).choose([Standing()], [7]) == Drafts()
    for most in ([], [0], [0, 0]):
        assert Pace().choose([Standing()], most) == Drafts()


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
        row = Standing()

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


# ---- a draft head and lookup, as measured: tokens and kept drafts are drawn before they are asked
# for, and a round is chosen before the one before it is read ----

LOOKUP = 1  # the second drafter
HEAD_TIMES = [1.20, 1.37, 1.46, 1.555, 1.67, 1.79, 1.87, 1.96]  # ms, by drafts, with e4m3 weights
LOOKUP_TIMES = [1.20, 1.25, 1.26, 1.27, 1.28, 1.29, 1.30, 1.30, *[1.40] * 3, 1.47, *[1.54] * 4]
TIMES = HEAD_TIMES, LOOKUP_TIMES
MOST = [7, 15]
FIXED = [Drafts(), *(Drafts(k) for k in (1, 2, 3, 5, 7)), Drafts(7, LOOKUP), Drafts(15, LOOKUP)]


@dataclass(frozen=True)
class Kind:
    """Of texts. A token is told by the text before it with the chance `told[run]`, behind a run of
    told ones; `edited` of the told ones begin a stretch of 5 to 25 new ones."""

    name: str
    head: tuple[float, float]  # chances that its first draft is kept, and each further one
    told: tuple[float, ...]
    edited: float = 0.0

    def text(self, length: int, draw: random.Random) -> list[tuple[bool, float]]:
        """Of each token whether it is told, and how hard it is for the head. Three tokens must have
        come before one is told."""
        found, run, new = [], 0, draw.randint(3, 8)
        for _ in range(length + max(MOST) + 1):
            chance = 0.03 if new else self.told[min(run, len(self.told) - 1)]
            told = draw.random() < chance
            run, new = run + 1 if told else 0, max(0, new - 1)
            if told and draw.random() < self.edited:
                new = draw.randint(5, 25)
            found.append((told, draw.random()))
        return found

    def kept(self, text: list[tuple[bool, float]], at: int, drafts: Drafts) -> int:
        chances = self.head[:1] + self.head[1:] * 6
        for i, (told, hard) in enumerate(text[at : at + drafts.num]):
            if not (told if drafts.drafter == LOOKUP else hard < chances[i]):
                return i
        return drafts.num


CODING = Kind("code", (0.79, 0.76), (0.05, 0.57, 0.62, 0.67))
CHATTING = Kind("chat", (0.54, 0.50), (0.02, 0.3, 0.45, 0.6))
EDITING = Kind("edits", (0.45, 0.45), (0.5, 0.93, 0.97, 0.98), 0.005)
NEVER = Kind("never", (0.1, 0.1), (0.01, 0.3, 0.4, 0.5))
Texts = list[tuple[Kind, list[tuple[bool, float]]]]


class LateEngine:
    """Rounds of one sequence at a time, chosen by a `Pace`. The first round with so many drafts of
    whom takes 0.3 ms more: its graph is new."""

    def __init__(self, seed: int):
        self.pace, self._draw = Pace(None, LOOKUP), random.Random(seed)
        self._graphs: set[Drafts] = set()

    def answered(
        self, kind: Kind, text: list[tuple[bool, float]], length: int
    ) -> tuple[int, float]:
        """Tokens, and milliseconds without those of new graphs."""
        row, at, took, under_way = Standing(), 0, 0.0, None
        while at < length:
            drafts = self.pace.choose([row], MOST, under_way and under_way[0])
            if under_way:
                self._read(row, *under_way)
            kept = kind.kept(text, at, drafts)
            under_way = drafts, kept, [told for told, _ in text[at : at + kept + 1]]
            at, took = at + kept + 1, took + TIMES[drafts.drafter][drafts.num]
        self._read(row, *under_way)
        return at, took

    def _read(self, row: Standing, drafts: Drafts, kept: int, told: list[bool]) -> None:
        took = TIMES[drafts.drafter][drafts.num] * self._draw.uniform(0.98, 1.02)
        took += 0.3 * (drafts not in self._graphs)
        self._graphs.add(drafts)
        self.pace.see(1, drafts, took / 1000)
        if drafts.drafter != LOOKUP:
            self.pace.agreed(row, drafts.drafter, drafts.num, kept)
        for one in told:
            self.pace.told(row, one)


def fixed_rate(texts: Texts, length: int, drafts: Drafts) -> float:
    tokens, rounds = 0, 0
    for kind, text in texts:
        at = 0
        while at < length:
            at, rounds = at + 1 + kind.kept(text, at, drafts), rounds + 1
        tokens += at
    return tokens / (rounds * TIMES[drafts.drafter][drafts.num])


def over_the_best(
    kinds: Sequence[Kind], length: int, mixed: bool, each: int = 40
) -> dict[str, float]:
    """Tokens a millisecond of `each` texts of some kinds, over those of the fixed drafts that are
    best for the kind."""
    draw, engine = random.Random(length), LateEngine(0)
    texts = [(kind, kind.text(length, draw)) for kind in kinds for _ in range(each)]
    if mixed:
        draw.shuffle(texts)
    answers = [(kind, engine.answered(kind, text, length)) for kind, text in texts]
    found = {}
    for kind in kinds:
        own = [one for one in texts if one[0] is kind]
        best = max(fixed_rate(own, length, drafts) for drafts in FIXED)
        found[kind.name] = rate([answer for of, answer in answers if of is kind]) / best
    return found


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize(("length", "least"), [(72, 0.95), (128, 0.97), (256, 0.97)])
def test_with_a_head_and_lookup_each_kind_of_text_has_near_its_best(length, least, mixed):
    found = over_the_best([CODING, CHATTING, EDITING], length, mixed, each=3072 // length)
    assert min(found.values()) > least, found


def test_with_a_head_that_never_pays_for_one_kind_plain_rounds_lose_little():
    found = over_the_best([NEVER], 128, mixed=False, each=20)
    assert found["never"] > 0.98
    found = over_the_best([CODING, CHATTING, EDITING, NEVER], 128, mixed=True, each=24)
    assert min(found.values()) > 0.97, found


def test_what_is_looked_up_for_several_rows_needs_no_trials():
    """Where nothing is told, there are no drafts behind the first rounds."""
    pace, rows = Pace(None, LOOKUP), [Standing() for _ in range(4)]
    chosen = []
    for _ in range(300):
        chosen.append(pace.choose(rows, [0, 15]))
        pace.see(4, chosen[-1], 1 + 0.02 * chosen[-1].num)
        for row in rows:
            pace.told(row, False)
    assert set(chosen[20:]) == {Drafts()}
