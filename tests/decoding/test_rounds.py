"""Rounds that keep several tokens: the texts of plain decoding, whatever a drafter proposes."""

import contextlib
import random

import pytest
from history_decoder import HistoryDecoder, HistoryDrafter, expected
from scheduled import all_of, assert_nothing_is_held, tokens_of

from twellctl.decoding.bulk import Bulk
from twellctl.decoding.drafted import Drafted
from twellctl.decoding.engine import Sampling, Token
from twellctl.decoding.pages import PAGE, PagePool
from twellctl.decoding.rounds import Drafts
from twellctl.decoding.scheduler import Scheduler
from twellctl.decoding.sequence import Sequence

pytestmark = pytest.mark.usefixtures("reads_late")


def scheduler_of(
    num_pages: int = 40, max_running: int = 4, eos=frozenset(), drafts: int = 3, wrong: int = 5
) -> Scheduler:
    decoder = HistoryDecoder(num_pages)
    drafter = HistoryDrafter(decoder, drafts, wrong)
    return Scheduler(decoder, PagePool(num_pages), max_running, eos, [drafter], Drafts(drafts))


@pytest.mark.parametrize("budget", range(1, 12))
@pytest.mark.parametrize("length", [1, 60, 64, 99])
def test_max_tokens_may_end_a_sequence_in_the_middle_of_a_round(length, budget):
    scheduler = scheduler_of()
    prompt = [i % 50 for i in range(length)]
    sequence = Sequence(prompt, Sampling(budget, 0, densities=True))
    events = all_of(scheduler, [sequence])[sequence]
    assert tokens_of(events) == expected(prompt, budget)
    assert {token.densities for token in events[:-1]} == {(0.25, 0.5)}
    assert scheduler.reports.generated_tokens == budget
    assert (scheduler.reports.fired / budget).tolist() == [0.25, 0.5]
    assert_nothing_is_held(scheduler)


def test_rounds_are_fewer_than_tokens():
    scheduler = scheduler_of(wrong=1000)
    sequence = Sequence([1, 2, 3], Sampling(41, 0))
    assert tokens_of(all_of(scheduler, [sequence])[sequence]) == expected([1, 2, 3], 41)
    rounds = [call for call in scheduler.decoder.calls if call[0] == "round"]
    assert 10 <= len(rounds) <= 11  # four tokens each, and one that was launched too early


def test_tokens_say_who_drafted_them():
    """Every fifth position is one where the drafter is wrong."""
    scheduler = scheduler_of(wrong=5)
    sequence = Sequence([1, 2, 3], Sampling(41, 0))
    first, *events, _ = all_of(scheduler, [sequence])[sequence]
    assert first.draft is None
    drafted = Drafted()
    for position, token in enumerate(events, len(sequence.tokens) - len(events)):
        assert token.draft.drafter == "history"
        assert not (token.draft.kept and position % 5 == 0)
        drafted.see(token.draft)
    assert drafted == scheduler.tally.drafted
    assert drafted.num_kept + drafted.passes == len(events)
    assert drafted.tokens_a_pass == len(events) / drafted.passes > 2
    plain = Scheduler(HistoryDecoder(), PagePool(40), 1, frozenset())
    sequence = Sequence([1, 2, 3], Sampling(9, 0))
    *events, _ = all_of(plain, [sequence])[sequence]
    assert {token.draft for token in events} == {None}
    assert str(plain.tally.drafted) == ""


def test_drafts_that_are_all_wrong_change_no_token():
    scheduler = scheduler_of(wrong=1)
    sequences = [Sequence([i], Sampling(30, 0)) for i in range(3)]
    for i, events in enumerate(all_of(scheduler, sequences).values()):
        assert tokens_of(events) == expected([i], 30)


@pytest.mark.parametrize("place", range(9))
def test_an_end_token_in_the_middle_of_a_round(place):
    prompt = [3, 1, 4]
    known = expected(prompt, 30)
    eos = frozenset({known[place]})
    stop = next(i for i, token in enumerate(known) if token in eos)
    scheduler = scheduler_of(eos=eos, wrong=1000)
    goes_on = Sequence(prompt, Sampling(30, 0, ignore_eos=True))
    sequence = Sequence(prompt, Sampling(30, 0))
    found = all_of(scheduler, [sequence, goes_on])
    assert tokens_of(found[sequence]) == known[: stop + 1]
    assert tokens_of(found[goes_on]) == known
    assert_nothing_is_held(scheduler)


@pytest.mark.parametrize(("seed", "drafts"), [(0, 1), (1, 3), (2, 7), (3, 3)])
def test_whatever_comes_and_goes_tokens_are_right_and_pages_are_free_at_the_end(seed, drafts):
    """With evictions, and sequences that are cancelled while rounds run."""
    draw = random.Random(seed)
    num_pages, most = draw.choice([6, 9, 30]), draw.choice([1, 3, 6])
    scheduler = scheduler_of(num_pages, most, drafts=drafts, wrong=draw.choice([3, 7]))
    longest = min(scheduler.context, 350)
    found: dict[Sequence, list] = {}
    for _ in range(100):
        if draw.random() < 0.15:
            length = draw.randint(1, longest - 1)
            prompt = [draw.randrange(200) for _ in range(length)]
            budget = draw.randint(1, min(150, longest - length))
            found[sequence := Sequence(prompt, Sampling(budget, 0))] = []
            scheduler.add(sequence)
        if found and draw.random() < 0.03:
            scheduler.cancel(draw.choice(list(found)))
        for sequence, event in scheduler.advance():
            found[sequence].append(event)
    while scheduler.busy:
        for sequence, event in scheduler.advance():
            found[sequence].append(event)
    ended = [sequence for sequence, events in found.items() if events[-1:] == [None]]
    assert len(ended) > len(found) / 4
    for sequence, events in found.items():
        known = expected(sequence.tokens[: sequence.num_prompt], sequence.sampling.max_tokens)
        tokens = [event.id for event in events if isinstance(event, Token)]
        assert tokens == known[: len(tokens)]
        assert len(tokens) == len(known) or sequence not in ended
    assert_nothing_is_held(scheduler)


def test_a_round_may_need_several_pages():
    scheduler = scheduler_of(num_pages=12, drafts=3 * PAGE, wrong=10_000)
    sequences = [Sequence([i] * 40, Sampling(4 * PAGE, 0)) for i in range(2)]
    for i, events in enumerate(all_of(scheduler, sequences).values()):
        assert tokens_of(events) == expected([i] * 40, 4 * PAGE)
    assert_nothing_is_held(scheduler)


class Choices:
    """A guide that allows all; it must be asked about each token by itself."""

    def __init__(self):
        self.tokens = []

    def compute_bitmask(self) -> bytes:
        return b"\xff" * 27

    def consume_token(self, token: int) -> bool:
        self.tokens.append(token)
        return True


def test_with_a_guide_rounds_have_no_drafts():
    scheduler, guide = scheduler_of(), Choices()
    guided = Sequence([1], Sampling(9, 0, guide=lambda: guide))
    plain = Sequence([2], Sampling(30, 0))
    found = all_of(scheduler, [guided, plain])
    assert tokens_of(found[guided]) == guide.tokens == expected([1], 9)
    assert tokens_of(found[plain]) == expected([2], 30)
    kinds = [call[0] for call in scheduler.decoder.calls]
    assert kinds.index("round") > 8


@pytest.mark.parametrize("drafts", [0, 1, 4, 11])
def test_bulk_reads_rounds_as_the_scheduler_does(drafts):
    draw = random.Random(drafts)
    prompts = [[draw.randrange(200) for _ in range(draw.randint(1, 90))] for _ in range(25)]
    ends, decoder = frozenset(range(0, 200, 23)), HistoryDecoder(40)
    decoder.prefill_chunk = 10_000
    drafters = [HistoryDrafter(decoder, drafts, 5)] if drafts else []
    most = [draw.randint(1, 60) for _ in prompts]
    sequences = [Sequence(prompts[i], Sampling(most[i], 0), i) for i in range(len(prompts))]
    waiting = iter(sequences)
    with contextlib.closing(
        Bulk(decoder, 40, ends, rows=6, longest=150, drafters=drafters)
    ) as bulk:
        found = {s.client: s.tokens[s.num_prompt :] for s in bulk.run(lambda: next(waiting, None))}
    assert len(found) == len(prompts)
    for i, prompt in enumerate(prompts):
        known = expected(prompt, most[i])
        stop = next((j for j, token in enumerate(known) if token in ends), most[i])
        assert found[i] == known[: stop + 1]
    assert bulk.num_drawn == sum(map(len, found.values()))
    assert bulk.num_tokens == 0
