"""Continuous batching: every sequence gets its own tokens, whatever goes on beside it."""

import random
import weakref
from itertools import pairwise

import pytest
import torch
from history_decoder import HistoryDecoder, HistoryDrafter, expected
from scheduled import all_of, assert_nothing_is_held, tokens_of

from twellctl.decoding.engine import EngineError, OutOfMemory, Sampling, Token
from twellctl.decoding.lookup import LookupDrafter
from twellctl.decoding.pages import PAGE, PagePool
from twellctl.decoding.rounds import NO_TOKEN
from twellctl.decoding.scheduler import Scheduler
from twellctl.decoding.sequence import Sequence

pytestmark = pytest.mark.usefixtures("reads_late")
GREEDY = Sampling(40, 0)


in_both_modes = pytest.mark.usefixtures("both_modes")
MODES = {"is_drafted": False}


@pytest.fixture(params=[False, True], ids=["alone", "drafted for"])
def both_modes(request, monkeypatch) -> None:
    """Rounds without drafts, and those of exact answers, with as many as seem to pay."""
    monkeypatch.setitem(MODES, "is_drafted", request.param)


def scheduler_of(decoder=None, num_pages=40, max_running=4, eos=frozenset()) -> Scheduler:
    decoder = decoder or HistoryDecoder(num_pages)
    drafters = []
    if MODES["is_drafted"]:
        decoder.stable = True
        looked_up = LookupDrafter(max_running, decoder.context, decoder.device)
        drafters = [HistoryDrafter(decoder, 3, 5), looked_up]
    return Scheduler(decoder, PagePool(num_pages), max_running, eos, drafters)


@in_both_modes
@pytest.mark.parametrize("length", [1, 63, 64, 65, 99, 100, 101, 333])
def test_one_sequence(length):
    scheduler = scheduler_of()
    prompt = [i % 50 for i in range(length)]
    sequence = Sequence(prompt, GREEDY)
    assert tokens_of(all_of(scheduler, [sequence])[sequence]) == expected(prompt, 40)
    assert (scheduler.prompt_tokens, scheduler.generated_tokens) == (length, 40)
    assert (scheduler.fired / 40).tolist() == [0.25, 0.5]
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
        assert scheduler.num_running == 1
    assert scheduler.num_running == 0


@in_both_modes
@pytest.mark.parametrize("seed", range(4))
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
    assert scheduler.generated_tokens == 360
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
    assert (scheduler.fired / scheduler.generated_tokens).tolist() == [0.25, 0.5]
    assert_nothing_is_held(scheduler)


def test_rows_read_together_leave_a_page_to_each_that_runs():
    decoder = HistoryDecoder()
    scheduler = scheduler_of(decoder, num_pages=6, max_running=5)  # 5 pages
    sequences = [Sequence([i] * 5, GREEDY) for i in range(5)]
    found = all_of(scheduler, sequences)
    assert decoder.calls[0] == ("prefill", *(0, 5) * 3)  # a fourth and its three neighbours: 7
    for i, sequence in enumerate(sequences):
        assert tokens_of(found[sequence]) == expected([i] * 5, 40)


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


# ---- failures ----


class Failing(HistoryDecoder):
    """Fails where a prompt holds token 200, and in the `at`-th pass with one token a row."""

    def __init__(self, error: Exception, at: int = -1):
        super().__init__()
        self.error, self.at = error, at

    def run(self, tokens, positions, tables, last=1, **how):
        is_step = tokens.shape[1] == 1
        self.at -= is_step
        is_prompt = last < tokens.shape[1]
        if self.at == 0 if is_step else is_prompt and (tokens == 200).any():
            raise self.error
        return super().run(tokens, positions, tables, last, **how)


NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 TiB")


@in_both_modes
@pytest.mark.parametrize(
    ("error", "kind"), [(NO_MEMORY, OutOfMemory), (IndexError("no such\nlayer"), EngineError)]
)
def test_a_prompt_that_fails_fails_alone(error, kind):
    scheduler = scheduler_of(Failing(error))
    sequences = [Sequence([i] * 150, GREEDY) for i in range(3)]
    bad = Sequence([1] * 120 + [200], GREEDY)
    found = all_of(scheduler, [*sequences[:2], bad, sequences[2]])
    (failure,) = found[bad]
    assert type(failure) is kind
    assert "\n" not in str(failure)
    for i, sequence in enumerate(sequences):
        assert tokens_of(found[sequence]) == expected([i] * 150, 40)
    assert_nothing_is_held(scheduler)


@pytest.mark.parametrize("error", [NO_MEMORY, IndexError("lost")])
def test_of_prompts_read_together_only_the_one_that_fails_fails(error):
    decoder = Failing(error)
    scheduler = scheduler_of(decoder)
    sequences = [Sequence([i] * 20, GREEDY) for i in range(3)]
    bad = Sequence([1] * 14 + [200], GREEDY)
    found = all_of(scheduler, [*sequences[:2], bad, sequences[2]])
    (failure,) = found[bad]
    assert isinstance(failure, EngineError)
    for i, sequence in enumerate(sequences):
        assert tokens_of(found[sequence]) == expected([i] * 20, 40)
    assert decoder.calls[:3] == [("prefill", 0, 20)] * 3  # alone, after all in one
    assert scheduler.prompt_tokens == 60
    assert_nothing_is_held(scheduler)


class Panic(BaseException):
    """As a grammar's library in Rust raises it: no Exception."""


class Broken:
    """A guide whose `method` fails when it is asked for the `at`-th time."""

    def __init__(self, method: str, error: BaseException, at: int):
        self.method, self.error, self.left = method, error, at

    def compute_bitmask(self) -> bytes:
        self._asked("compute_bitmask")
        return b"\xff" * 27

    def consume_token(self, token: int) -> bool:
        self._asked("consume_token")
        return True

    def _asked(self, method: str) -> None:
        self.left -= method == self.method
        if self.left == 0:
            raise self.error


@in_both_modes
@pytest.mark.parametrize("error", [RuntimeError("lexer\nbroke"), Panic("lexer broke")])
@pytest.mark.parametrize(
    ("method", "at", "count"),  # the first mask is that of the token after the prompt
    [("compute_bitmask", 1, 0), ("compute_bitmask", 3, 2), ("consume_token", 3, 3)],
)
def test_a_guide_that_fails_ends_its_own_answer_alone(error, method, at, count):
    scheduler = scheduler_of()
    sequences = [Sequence([i] * 20, GREEDY) for i in range(3)]
    guided = Sampling(40, 0, guide=lambda: Broken(method, error, at))
    bad = Sequence([9] * 20, guided)
    found = all_of(scheduler, [*sequences[:2], bad, sequences[2]])
    *tokens, failure = found[bad]
    said = f"the grammar of this answer failed: {type(error).__name__}: lexer broke"
    assert str(failure) == said
    assert [token.id for token in tokens] == expected([9] * 20, count)
    for i, sequence in enumerate(sequences):
        assert tokens_of(found[sequence]) == expected([i] * 20, 40)
    assert_nothing_is_held(scheduler)


def test_a_step_without_memory_fails_the_youngest_only():
    scheduler = scheduler_of(Failing(NO_MEMORY, at=10))
    sequences = [Sequence([i] * 20, GREEDY) for i in range(3)]
    found = all_of(scheduler, sequences)
    *tokens, failure = found[sequences[2]]
    assert isinstance(failure, OutOfMemory)
    assert [token.id for token in tokens] == expected([2] * 20, 10)
    for i in range(2):
        assert tokens_of(found[sequences[i]]) == expected([i] * 20, 40)
    assert_nothing_is_held(scheduler)


@pytest.mark.parametrize("kind", ["prompt", "step"])
def test_memory_is_freed_when_nothing_of_the_failure_holds_it(kind, monkeypatch):
    """An error that is being handled holds the tensors of its frames."""

    class Large:
        """Of a decoder that runs out of memory."""

    held, freed = weakref.WeakSet(), []

    def hungry(*inputs, **how):
        held.add(large := Large())
        raise torch.OutOfMemoryError(f"CUDA out of memory for {large}")

    decoder = HistoryDecoder()
    scheduler = scheduler_of(decoder)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(len(held)))
    if kind == "step":
        scheduler.add(Sequence([1], GREEDY))
        scheduler.advance()
    monkeypatch.setattr(decoder, "run", hungry)
    scheduler.add(Sequence([2], GREEDY))
    scheduler.advance()
    assert freed == [0]


def test_a_step_that_fails_otherwise_fails_those_in_it_and_no_others():
    scheduler = scheduler_of(Failing(IndexError("lost"), at=10), max_running=2)
    sequences = [Sequence([i] * 50, GREEDY) for i in range(4)]
    found = all_of(scheduler, sequences)
    for sequence in sequences[:2]:
        assert str(found[sequence][-1]) == "IndexError: lost"
        assert len(found[sequence]) == 11
    for i in range(2, 4):
        assert tokens_of(found[sequences[i]]) == expected([i] * 50, 40)
    assert_nothing_is_held(scheduler)


@in_both_modes
def test_fail_all_ends_what_runs_is_read_and_waits():
    scheduler = scheduler_of(max_running=2)
    sequences = [Sequence([i] * n, GREEDY) for i, n in enumerate((10, 400, 10))]
    for sequence in sequences:
        scheduler.add(sequence)
    while scheduler.num_running < 2:
        scheduler.advance()
    assert sequences[1].cached == 100
    error = EngineError("enough")
    assert scheduler.fail_all(error) == [(sequence, error) for sequence in sequences]
    assert_nothing_is_held(scheduler)
    assert tokens_of(all_of(scheduler, [new := Sequence([5], GREEDY)])[new]) == expected([5], 40)


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
