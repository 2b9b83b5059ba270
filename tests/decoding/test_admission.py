"""Which sequences wait, whose prompts are read together, and who has pages."""

from itertools import pairwise

import pytest
from history_decoder import HistoryDecoder, expected
from scheduled import all_of, assert_nothing_is_held, in_both_modes, scheduler_of, tokens_of

from twellctl.decoding.engine import EngineError, Sampling
from twellctl.decoding.pages import PAGE
from twellctl.decoding.sequence import Sequence

pytestmark = pytest.mark.usefixtures("reads_late")
GREEDY = Sampling(40, 0)


@in_both_modes
def test_the_youngest_loses_its_pages_and_goes_on_later():
    decoder = HistoryDecoder()
    scheduler = scheduler_of(decoder, num_pages=8, max_running=3)  # 7 pages
    sequences = [Sequence([i] * 100, Sampling(120, 0)) for i in range(3)]  # 4 pages each at last
    found = all_of(scheduler, sequences)
    for i, sequence in enumerate(sequences):
        assert tokens_of(found[sequence]) == expected([i] * 100, 120)
    again = [call for call in decoder.calls if call[0] == "prefill"]
    assert len(again) > 3
    assert scheduler.prompt_tokens == 300  # what is read again is not counted again
    assert scheduler.reports.generated_tokens == 360
    assert_nothing_is_held(scheduler)


@in_both_modes
def test_the_oldest_never_waits_however_little_room_there_is():
    """So each comes to its end, since each is the oldest at some time."""
    scheduler = scheduler_of(num_pages=8, max_running=3)  # 7 pages, for 12 at last
    sequences = [Sequence([i] * 100, Sampling(120, 0)) for i in range(3)]
    turns: dict[Sequence, list[int]] = {sequence: [] for sequence in sequences}
    for sequence in sequences:
        scheduler.add(sequence)
    for turn in range(1000):
        for sequence, _ in scheduler.advance():
            turns[sequence].append(turn)
    assert_nothing_is_held(scheduler)
    oldest = turns[sequences[0]]
    longest_wait = max(after - before for before, after in pairwise(oldest))
    assert longest_wait <= 2  # while the prompt of another is read
    assert sorted(sequences, key=lambda sequence: turns[sequence][-1]) == sequences


def test_chunks_of_a_long_prompt_lie_between_steps():
    decoder = HistoryDecoder()
    scheduler = scheduler_of(decoder)
    scheduler.add(Sequence([1], Sampling(60, 0)))
    scheduler.advance()
    scheduler.advance()
    long = Sequence([2] * 450, Sampling(3, 0))
    scheduler.add(long)
    decoder.calls.clear()
    while not long.gone:
        scheduler.advance()
    kinds = [call[0] for call in decoder.calls]
    chunks = [call[1:] for call in decoder.calls if call[0] == "prefill"]
    assert chunks == [(0, 100), (100, 200), (200, 300), (300, 400), (400, 450)]
    assert kinds[:9] == ["prefill", "step"] * 4 + ["prefill"]


def test_short_prompts_are_read_together_before_a_step():
    decoder = HistoryDecoder()
    scheduler = scheduler_of(decoder)
    for i in range(4):
        scheduler.add(Sequence([i] * 20, GREEDY))
    assert len(scheduler.advance()) == 4  # first tokens are told before
    scheduler.advance()
    assert decoder.calls == [("prefill", *(0, 20) * 4), ("step", 4)]


@pytest.mark.parametrize(
    ("lengths", "most", "rows"),
    [
        ([33, 33, 33, 33], 20, [3, 1]),  # no more than the 100 tokens of a prefill
        ([10, 19, 20], 20, [3]),
        ([10, 60, 20], 20, [1, 1, 1]),  # no more than half of it filled up
        ([250, 10, 10], 20, [1, 1, 1, 2]),  # a long one's chunks are read alone
        ([3] * 20, 20, [16, 4]),
        ([5] * 5, 3, [3, 2]),  # no more than may run
    ],
)
def test_what_is_read_together(lengths, most, rows):
    decoder = HistoryDecoder()
    scheduler = scheduler_of(decoder, max_running=most)
    sequences = [Sequence([i] * length, GREEDY) for i, length in enumerate(lengths)]
    for sequence, events in all_of(scheduler, sequences).items():
        assert tokens_of(events) == expected(sequence.tokens[: sequence.num_prompt], 40)
    calls = [call for call in decoder.calls if call[0] == "prefill"]
    assert [(len(call) - 1) // 2 for call in calls] == rows
    assert scheduler.prompt_tokens == sum(lengths)
    assert (scheduler.reports.fired / scheduler.reports.generated_tokens).tolist() == [0.25, 0.5]
    assert_nothing_is_held(scheduler)


def test_rows_read_together_leave_a_page_to_each_that_runs():
    decoder = HistoryDecoder()
    scheduler = scheduler_of(decoder, num_pages=6, max_running=5)  # 5 pages
    sequences = [Sequence([i] * 5, GREEDY) for i in range(5)]
    found = all_of(scheduler, sequences)
    assert decoder.calls[0] == ("prefill", *(0, 5) * 3)  # a fourth and its three neighbours: 7
    for i, sequence in enumerate(sequences):
        assert tokens_of(found[sequence]) == expected([i] * 5, 40)


@pytest.mark.parametrize(
    ("prompt", "budget", "said"),
    [
        ([1] * 100, PAGE * 5, "room for 420 tokens, there is room for 320"),
        ([], 5, "at least one token"),
        ([1], 0, "at least one token"),
    ],
)
def test_what_can_never_fit_is_refused(prompt, budget, said):
    scheduler = scheduler_of(num_pages=6)
    with pytest.raises(EngineError, match=said):
        scheduler.add(Sequence(prompt, Sampling(budget, 0)))
    assert_nothing_is_held(scheduler)


@in_both_modes
def test_the_longest_that_fits_uses_every_page():
    scheduler = scheduler_of(num_pages=6, max_running=2)
    sequence = Sequence([1] * 100, Sampling(PAGE * 5 - 100, 0))
    other = Sequence([2] * 100, Sampling(50, 0))
    found = all_of(scheduler, [sequence, other])
    assert tokens_of(found[sequence]) == expected([1] * 100, PAGE * 5 - 100)
    assert tokens_of(found[other]) == expected([2] * 100, 50)
