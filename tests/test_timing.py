"""How candidates are timed: by turns, over rotated inputs, with a counter of energy."""

import builtins
import itertools
import math
import time

import pytest
import torch

from twellctl.bench import energy, timing
from twellctl.bench.contest import Contender, hold, open_course, relative_errors
from twellctl.bench.energy import joules_per_call, open_counter
from twellctl.bench.results import DENSE, TWELL
from twellctl.bench.settings import FfnSettings
from twellctl.bench.timing import Timer, by_turns
from twellctl.errors import TwellError

CPU = torch.device("cpu")


def course(rounds: int = 1):
    settings = FfnSettings(device="cpu", rounds=rounds)
    return open_course(settings, lambda text: None, lambda done, total: None)


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
    took, calls = timer.run(0.2)
    assert took / calls == pytest.approx(0.02, rel=0.5)


def test_energy_is_power_between_ticks_times_the_time_of_a_call():
    begin = time.perf_counter()
    ticks = 0.02  # the counter moves fifty times a second, at 100 W

    def counter() -> int:
        return int((time.perf_counter() - begin) / ticks) * int(1000 * 100 * ticks)

    timer = Timer(lambda number: time.sleep(0.002), 1, CPU, graphed=False)
    assert joules_per_call(timer, counter, 0.4) == pytest.approx(100 * timer.seconds(), rel=0.3)


def test_a_counter_that_stands_still_is_no_energy():
    timer = Timer(lambda number: time.sleep(0.001), 1, CPU, graphed=False)
    with pytest.raises(TwellError, match=r"moved 0 times in .* leave out --energy"):
        joules_per_call(timer, lambda: 7, 0.05)


def test_without_a_counter_energy_is_refused(monkeypatch):
    with pytest.raises(TwellError, match="there is none on the CPU: leave out --energy"):
        open_counter(CPU)
    imported = builtins.__import__

    def without_pynvml(name, *rest):
        if name == "pynvml":
            raise ImportError(name)
        return imported(name, *rest)

    class Gpu:
        uuid = "0"

    monkeypatch.setattr(builtins, "__import__", without_pynvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Gpu)
    monkeypatch.setattr(energy.ctypes, "CDLL", no_library)
    with pytest.raises(TwellError, match=r"NVML \(libnvidia-ml.so.1\) is not here: leave out"):
        open_counter(torch.device("cuda"))


def no_library(name: str):
    raise OSError(f"{name}: cannot open shared object file")


def test_nvml_is_asked_for_the_gpu_by_its_uuid(monkeypatch):
    asked, energies = [], itertools.count(5)

    class Library:
        class nvmlErrorString:
            pass

        @staticmethod
        def nvmlInit_v2():
            return 0

        @staticmethod
        def nvmlDeviceGetHandleByUUID(uuid, handle):
            asked.append(uuid)
            return 0

        @staticmethod
        def nvmlDeviceGetTotalEnergyConsumption(handle, energy):
            energy._obj.value = next(energies)
            return 0

    monkeypatch.setattr(energy.ctypes, "CDLL", lambda name: Library)
    counter = energy._by_library("GPU-1-2")
    assert asked == [b"GPU-1-2"]
    assert [counter(), counter()] == [5, 6]


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
