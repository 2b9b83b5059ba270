"""Schedulers without a model: what became of each sequence, and that nothing is held afterwards."""

import pytest
from history_decoder import HistoryDecoder, HistoryDrafter

from twellctl.decoding.engine import Token
from twellctl.decoding.lookup import LookupDrafter
from twellctl.decoding.pages import PagePool
from twellctl.decoding.scheduler import Scheduler
from twellctl.decoding.sequence import Sequence

in_both_modes = pytest.mark.usefixtures("both_modes")
MODES = {"is_drafted": False}


def scheduler_of(
    decoder: HistoryDecoder | None = None,
    num_pages: int = 40,
    max_running: int = 4,
    eos: frozenset[int] = frozenset(),
) -> Scheduler:
    """Without drafts, or as for exact answers, with as many as seem to pay."""
    decoder = decoder or HistoryDecoder(num_pages)
    drafters = []
    if MODES["is_drafted"]:
        decoder.stable = True
        looked_up = LookupDrafter(max_running, decoder.context, decoder.device)
        drafters = [HistoryDrafter(decoder, 3, 5), looked_up]
    return Scheduler(decoder, PagePool(num_pages), max_running, eos, drafters)


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
    assert scheduler.admission.pool.free == scheduler.admission.pool.capacity
    assert not scheduler.busy
    assert scheduler.admission.num_running == 0
