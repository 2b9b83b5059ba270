"""How long steps take: prompts continued greedily in this thread, each step timed."""

import time
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from twellctl.decoding.engine import EngineError, Sampling
from twellctl.decoding.scheduler import Scheduler


@dataclass(frozen=True)
class TimedRun:
    """The tokens after each prompt; the time of each step that continued all of them, in seconds.

    A step is timed from the end of the one before to its own, tokens on the host.
    """

    tokens: list[list[int]]
    step_seconds: list[float]


def timed_run(scheduler: Scheduler, prompts: Tokens[Tokens[int]], num_tokens: int) -> TimedRun:
    """Continue `prompts` by `num_tokens` each, end tokens or not; all must be able to run at once.

    Raises `EngineError`.
    """
    if len(prompts) > scheduler.max_running:
        said = f"{scheduler.max_running} prompts can be continued at once, got {len(prompts)}"
        raise EngineError(said)
    tokens: list[list[int]] = [[] for _ in prompts]
    seconds, last = [], None
    for events in scheduler.run(prompts, Sampling(num_tokens, 0, ignore_eos=True)):
        now = time.perf_counter()
        told = 0
        for sequence, event in events:
            if isinstance(event, EngineError):
                raise event
            if event is not None:
                tokens[sequence.client].append(event.id)
                told += 1
        whole = told == len(prompts) and min(map(len, tokens)) > 1
        if whole and last is not None:
            seconds.append(now - last)
        last = now if told else last
    return TimedRun(tokens, seconds)
