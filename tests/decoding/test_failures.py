"""What fails in the middle of other sequences: prompts, steps, guides, memory, all at once."""

import weakref

import pytest
import torch
from history_decoder import HistoryDecoder, expected
from scheduled import all_of, assert_nothing_is_held, in_both_modes, scheduler_of, tokens_of

from twellctl.decoding.engine import EngineError, OutOfMemory, Sampling
from twellctl.decoding.sequence import Sequence

pytestmark = pytest.mark.usefixtures("reads_late")
GREEDY = Sampling(40, 0)


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
    while scheduler.admission.num_running < 2:
        scheduler.advance()
    assert sequences[1].cached == 100
    error = EngineError("enough")
    assert scheduler.fail_all(error) == [(sequence, error) for sequence in sequences]
    assert_nothing_is_held(scheduler)
    assert tokens_of(all_of(scheduler, [new := Sequence([5], GREEDY)])[new]) == expected([5], 40)
