"""How candidates are timed: by turns, over rotated inputs."""

import math
import time

import pytest
import torch

from twellctl.bench import timing
from twellctl.bench.contest import Contender, Course, hold, relative_errors
from twellctl.bench.results import DENSE, TWELL
from twellctl.bench.timing import Timer, by_turns
from twellctl.errors import TwellError

CPU = torch.device("cpu")


def course(rounds: int = 1) -> Course:
    return Course(CPU, rounds, lambda text: None, lambda done, total: None)


class Recorded:
    """A stand-in for a timer that says when it was asked."""

    def __init__(self, name: str, asked: list[str]):
        self.name, self.asked = name, asked

    def seconds(self) -> float:
        self.asked.append(self.name)
        return 1.0


def test_each_round_takes_every_candidate_once_and_every_other_one_backwards():
    asked, told = [], []
    timers = {name: Recorded(name, asked) for name in "abc"}
    samples = by_turns(timers, 3, lambda done, total: told.append((done, total)))
    assert "".join(asked) == "abccbaabc"
    assert {name: len(taken) for name, taken in samples.items()} == {"a": 3, "b": 3, "c": 3}
    assert told == [(n, 9) for n in range(1, 10)]


def test_calls_go_through_all_inputs_in_turn(monkeypatch):
    monkeypatch.setattr(timing, "SAMPLE_SECONDS", 0.001)
    numbers: list[int] = []
    timer = Timer(lambda number: numbers.append(number), 3, CPU, graphed=True)
    timer.seconds()
    assert timer.how == "wall clock"
    assert numbers[:12] == [0, 1, 2] * 4


def test_seconds_are_those_of_one_call():
    timer = Timer(lambda number: time.sleep(0.02), 1, CPU, graphed=False)
    assert timer.seconds() == pytest.approx(0.02, rel=0.5)  # a busy machine wakes it late


def test_a_dense_candidate_may_fail_and_is_left_out():
    def fail(number: int):
        raise RuntimeError("no compiler\nat all")

    rows = torch.ones(4, 4)
    runs = Contender("dense eager", DENSE, lambda number: rows)
    ours = Contender("twell", TWELL, lambda number: rows)
    fails = Contender("dense compile", DENSE, fail)
    numbers = {"what": "4 tokens", "tokens": 4}

    def errors(y):
        return relative_errors(y, rows.double())

    outcome = hold(course(rounds=2), [runs, fails, ours], errors, **numbers)
    assert outcome.skipped == {"dense compile": "no compiler"}
    assert [c.name for c in outcome.candidates] == ["dense eager", "twell"]
    assert [len(c.samples) for c in outcome.candidates] == [2, 2]
    for must_run in (Contender("twell", TWELL, fail), Contender("dense eager", DENSE, fail)):
        with pytest.raises(TwellError, match=f"{must_run.name} failed .4 tokens.: no compiler"):
            hold(course(), [must_run], errors, **numbers)


def test_relative_errors_leave_rows_next_to_nothing_out_of_the_worst():
    expected = torch.ones(4, 8, dtype=torch.float64)
    expected[3] = 1e-9
    y = expected.clone()
    y[1] *= 1.1
    y[3] *= 2
    overall, worst = relative_errors(y.float(), expected).values()
    assert overall == pytest.approx(0.1 / 3**0.5, rel=1e-3)
    assert worst == pytest.approx(0.1, rel=1e-3)
    y[1, 1] = torch.nan
    assert math.isnan(relative_errors(y, expected)["error"])
