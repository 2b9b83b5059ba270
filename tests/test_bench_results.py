"""What a bench says: ratios over the fastest, the sentences, the JSON."""

import json
import math
import time

import pytest
import torch

from twellctl.bench import results, timing
from twellctl.bench.contest import Contender, Course, hold, relative_errors
from twellctl.bench.results import DENSE, TWELL
from twellctl.bench.timing import Timer, by_turns
from twellctl.errors import TwellError


def point(tokens: int, skipped: dict | None = None, **ms: float):
    """A point whose candidates took so many milliseconds; names with "_" for the blank."""
    names = {name.replace("_", " "): value for name, value in ms.items()}
    kinds = (results.DENSE, results.TWELL)
    candidates = tuple(
        results.Candidate(
            name=name,
            kind=next(kind for kind in kinds if name.startswith(kind)),
            samples=(value / 1000, value / 1000, 1.0),
            errors={"error": 0.003, "worst_row_error": 0.004},
        )
        for name, value in names.items()
    )
    about = {"density": 0.01, "auto_took": {}, "without_kernels": None}
    outcome = results.Outcome("plain calls", candidates, skipped or {})
    return results.Point(tokens, about, "float64", outcome)


def bench(*points: results.Point, device: str = "NVIDIA H200") -> results.Bench:
    return results.Bench({"device": device}, {}, "this model", points)


def test_ratios_are_of_the_fastest_over_the_fastest_of_all_dense_candidates():
    found = point(100, dense_eager=3, dense_compile=2, twell=1.5, twell_compile=1)
    assert (found.dense.name, found.twell.name) == ("dense compile", "twell compile")
    assert found.twell.seconds == 0.001  # the slower sample does not move the median
    assert found.over_dense(found.twell) == 2
    assert found.to_json()["over_fastest_dense"] == 2
    ratios = {n: c["over_fastest_dense"] for n, c in found.to_json()["candidates"].items()}
    assert ratios["dense eager"] == pytest.approx(2 / 3)
    assert ratios["dense compile"] == 1


EAGER, COMPILED = "dense_eager", "dense_compile"


@pytest.mark.parametrize(
    ("large", "small", "said"),
    [
        (
            {EAGER: 2, COMPILED: 1.31},
            {EAGER: 3, COMPILED: 0.99},
            "1.31x as fast as compiled bf16 at 131072 tokens, 0.99x at 256",
        ),
        (
            {EAGER: 2, COMPILED: 1.31},
            {EAGER: 0.99, COMPILED: 3},
            "1.31x as fast as the fastest dense bf16 at 131072 tokens, 0.99x at 256",
        ),
        (
            {EAGER: 1.31},
            {EAGER: 0.99},
            "1.31x as fast as eager bf16 at 131072 tokens, 0.99x at 256",
        ),
    ],
)
def test_the_sentence_names_what_is_compared(large, small, said):
    points = point(131072, **large, twell=1), point(256, **small, twell=1)
    for place in ("CPU", "GPU"):
        found = bench(*points, device="CPU" if place == "CPU" else "NVIDIA H200").sentences
        assert found == [f"on this {place} this model is {said}"]


def test_the_json_names_the_fastest_dense_candidate():
    found = point(8, **{EAGER: 3, COMPILED: 1.5}, twell=1).to_json()
    assert (found["fastest_dense"], found["over_fastest_dense"]) == ("dense compile", 1.5)


@pytest.mark.parametrize("name", ["error", "worst_row_error"])
@pytest.mark.parametrize("value", [0.7, float("nan"), float("inf")])
def test_wrong_results_are_reported_and_never_break_the_json(name, value):
    right = point(100, dense_eager=3, twell=1)
    assert bench(right).wrong == []
    eager, twell = right.candidates
    spoilt = results.Candidate(**vars(twell) | {"errors": twell.errors | {name: value}})
    found = results.Point(100, right.about, "float64", results.Outcome("", (eager, spoilt), {}))
    assert f"twell has a relative {name.replace('_', ' ')} of" in bench(found).wrong[0]
    json.dumps(bench(found).to_json(), allow_nan=False)


# ---- how candidates are timed: by turns, over rotated inputs


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
    asked, progress = [], []
    timers = {name: Recorded(name, asked) for name in "abc"}
    samples = by_turns(timers, 3, lambda done, total: progress.append((done, total)))
    assert "".join(asked) == "abccbaabc"
    assert {name: len(taken) for name, taken in samples.items()} == {"a": 3, "b": 3, "c": 3}
    assert progress == [(n, 9) for n in range(1, 10)]


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
