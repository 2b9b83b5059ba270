"""Continuous batching: every sequence gets its own tokens, whatever goes on beside it."""

import random

import pytest
import torch
from compiled import EVERY_CASE
from history_decoder import HistoryDecoder, expected
from scheduled import all_of, assert_nothing_is_held, in_both_modes, scheduler_of, tokens_of

from twellctl.decoding.engine import Sampling, Token
from twellctl.decoding.rounds import NO_TOKEN
from twellctl.decoding.sequence import Sequence

pytestmark = pytest.mark.usefixtures("reads_late")
GREEDY = Sampling(40, 0)


@in_both_modes
@pytest.mark.parametrize("length", [1, 63, 64, 65, 99, 100, 101, 333])
def test_one_sequence(length):
    scheduler = scheduler_of()
    prompt = [i % 50 for i in range(length)]
    sequence = Sequence(prompt, GREEDY)
    assert tokens_of(all_of(scheduler, [sequence])[sequence]) == expected(prompt, 40)
    assert (scheduler.prompt_tokens, scheduler.reports.generated_tokens) == (length, 40)
    assert (scheduler.reports.fired / 40).tolist() == [0.25, 0.5]
    assert_nothing_is_held(scheduler)


@pytest.mark.parametrize(
    ("chosen", "new", "is_broken", "has_ended"),
    [
        ([], [], False, False),
        ([5, 6], [5, 6], False, False),
        ([5, 6, 7], [5, 6, 7], False, True),
        ([5, 6, 7, 8], [5, 6, 7], False, True),
        ([5, 6, 7, NO_TOKEN], [5, 6, 7], False, True),
        ([5, 6, 9, 8], [5, 6, 9], False, True),
        ([9, 5], [9], False, True),
        ([5, NO_TOKEN, 6], [5], True, False),
    ],
)
def test_of_what_is_chosen_a_sequence_takes_what_belongs_to_it(chosen, new, is_broken, has_ended):
    """Up to 3 tokens, or the one that ends it, 9."""
    sequence, ends = Sequence([1, 2], Sampling(3, 0)), frozenset({9})
    assert sequence.take(chosen, ends) == (new, is_broken)
    assert sequence.tokens == [1, 2, *new]
    assert sequence.has_ended(ends) == has_ended


@in_both_modes
def test_what_has_ended_takes_no_place():
    """Who was told of an end may come again at once, and finds room."""
    scheduler = scheduler_of()
    sequence = Sequence([1], GREEDY)
    scheduler.add(sequence)
    while not any(event is None for _, event in scheduler.advance()):
        assert scheduler.admission.num_running == 1
    assert scheduler.admission.num_running == 0


@in_both_modes
@pytest.mark.parametrize("seed", range(4 if EVERY_CASE else 2))
def test_whatever_comes_and_goes_tokens_are_right_and_pages_are_free_at_the_end(seed):
    draw = random.Random(seed)
    decoder = HistoryDecoder()
    scheduler = scheduler_of(decoder, draw.choice([6, 9, 30]), draw.choice([1, 3, 6]))
    longest = min(scheduler.context, 350)
    found: dict[Sequence, list] = {}
    for _ in range(120):
        if draw.random() < 0.12:
            length = draw.randint(1, longest - 1)
            budget = draw.randint(1, min(150, longest - length))
            prompt = [draw.randrange(200) for _ in range(length)]
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
        tokens = [event.id for event in events if event is not None]
        assert tokens == known[: len(tokens)]
        assert len(tokens) == len(known) or sequence not in ended
    assert_nothing_is_held(scheduler)


@in_both_modes
def test_an_end_token_ends_a_sequence_and_is_its_last():
    prompt = [3, 1, 4]
    known = expected(prompt, 30)
    eos = known[5]
    assert eos not in known[:5]
    scheduler = scheduler_of(eos=frozenset({eos}))
    (events,) = all_of(scheduler, [Sequence(prompt, Sampling(30, 0))]).values()
    assert tokens_of(events) == known[:6]
    first = scheduler_of(eos=frozenset({known[0]}))
    (events,) = all_of(first, [Sequence(prompt, Sampling(30, 0))]).values()
    assert tokens_of(events) == known[:1]
    assert_nothing_is_held(first)


@in_both_modes
def test_tokens_tell_what_was_asked():
    sequence = Sequence([1, 2], Sampling(3, 0, top_logprobs=2, densities=True))
    plain = Sequence([1, 2], Sampling(3, 0))
    none_beside = Sequence([1, 2], Sampling(3, 0, top_logprobs=0))
    found = all_of(scheduler_of(), [sequence, plain, none_beside])
    known = torch.zeros(HistoryDecoder.vocab_size)
    known[0] = 1
    chosen, other = known.log_softmax(-1)[:2].tolist()
    for token in found[sequence][:-1]:
        assert token.densities == (0.25, 0.5)
        assert token.logprob == pytest.approx(chosen)
        assert token.top[0][0] == token.id
        assert [value for _, value in token.top] == pytest.approx([chosen, other])
    assert all(t == Token(t.id) for t in found[plain][:-1])
    assert all(t.top == () and t.logprob is not None for t in found[none_beside][:-1])


@in_both_modes
def test_a_run_that_is_left_holds_nothing():
    scheduler = scheduler_of()
    for events in scheduler.run([[1], [2]], Sampling(50, 0)):
        if any(sequence.client == 1 for sequence, _ in events):
            break
    assert_nothing_is_held(scheduler)
    tokens = {0: [], 1: []}
    for events in scheduler.run([[1], [2]], Sampling(5, 0)):
        for sequence, token in events:
            tokens[sequence.client].append(token.id)
    assert tokens == {0: expected([1], 5), 1: expected([2], 5)}


def test_rows_are_filled_up_to_a_bucket():
    decoder = HistoryDecoder()
    scheduler = scheduler_of(decoder, max_running=6)
    all_of(scheduler, [Sequence([i], Sampling(3 + i, 0)) for i in range(6)])
    assert {call[1] for call in decoder.calls if call[0] == "step"} == {1, 2, 4, 6}


def test_what_comes_after_the_end_of_a_sequence_breaks_nothing():
    """A round may go on behind the last token that is wanted, with whatever numbers."""
    ended = Sequence([5], Sampling(8, 0))
    assert ended.take([6, 2, NO_TOKEN], frozenset({2})) == ([6, 2], False)
    full = Sequence([5], Sampling(2, 0))
    assert full.take([6, 7, NO_TOKEN], frozenset()) == ([6, 7], False)
    broken = Sequence([5], Sampling(8, 0))
    assert broken.take([6, NO_TOKEN, 7], frozenset()) == ([6], True)
