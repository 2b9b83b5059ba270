"""Steps that are timed."""

import time

import pytest
from history_decoder import HistoryDecoder, expected

from twellctl.bench.decode_runs import timed_run
from twellctl.decoding.engine import EngineError
from twellctl.decoding.scheduler import Scheduler


class Slow(HistoryDecoder):
    """A step takes ten milliseconds."""

    def step(self, tokens, positions, tables):
        time.sleep(0.01)
        return super().step(tokens, positions, tables)


@pytest.mark.parametrize("count", [1, 3, 6])
def test_each_step_of_all_prompts_is_timed(count):
    prompts = [[i] * 40 for i in range(count)]
    eos = frozenset(expected(prompts[0], 3))
    scheduler = Scheduler(Slow(), 40, 6, eos)
    run = timed_run(scheduler, prompts, 20)
    assert run.tokens == [expected(prompt, 20) for prompt in prompts]
    assert scheduler.eos_tokens == eos
    # first tokens come with the prompts, and rows that came first are a few steps ahead at last
    assert 16 <= len(run.step_seconds) <= 19
    assert 0.01 < sorted(run.step_seconds)[len(run.step_seconds) // 2] < 0.02
    assert scheduler.pool.free == scheduler.pool.capacity


def test_more_prompts_than_rows_are_refused():
    with pytest.raises(EngineError, match="2 prompts can be continued at once, got 3"):
        timed_run(Scheduler(HistoryDecoder(), 40, 2, frozenset()), [[1], [2], [3]], 5)


def test_a_failure_is_raised():
    with pytest.raises(EngineError, match="there is room for"):
        timed_run(Scheduler(HistoryDecoder(), 4, 2, frozenset()), [[1]], 500)
