"""Runs of a scheduler: what became of each sequence, and that nothing is held afterwards."""

import pytest

from twellctl.decoding.engine import Token
from twellctl.decoding.scheduler import Scheduler
from twellctl.decoding.sequence import Sequence


def all_of(scheduler: Scheduler, sequences: list[Sequence]) -> dict[Sequence, list]:
    """Run to the end; the events of each sequence."""
    found = {sequence: [] for sequence in sequences}
    for sequence in sequences:
        scheduler.add(sequence)
    for _ in range(10_000):
        if not scheduler.busy:
            return found
        for sequence, event in scheduler.advance():
            found[sequence].append(event)
    pytest.fail("it does not come to an end")


def tokens_of(events: list) -> list[int]:
    """The tokens of a sequence that came to its end."""
    *tokens, end = events
    assert end is None
    assert all(isinstance(token, Token) for token in tokens)
    return [token.id for token in tokens]


def assert_nothing_is_held(scheduler: Scheduler) -> None:
    assert scheduler.pool.free == scheduler.pool.capacity
    assert not scheduler.busy
    assert scheduler.num_running == 0
