"""What --dry-run counts with --bits, against what a fit rounds."""

from dataclasses import replace

import pytest
import torch

from twellctl.convert import convert
from twellctl.fitting import plan as plans
from twellctl.fitting.grid import Grid
from twellctl.fitting.plan import Rates, planned, shape_of
from twellctl.fitting.rounding_plan import Rounding, RoundingRates
from twellctl.fitting.settings import Fit
from twellctl.models.checkpoint import open_checkpoint
from twellctl.screens import make as screen

pytestmark = pytest.mark.usefixtures("no_answers")

QUICK = {"tokens": 2048, "seq_len": 32, "eval_windows": 8, "density": 1.0, "step_tokens": 64}
RATES = Rates(1e12, 1e12, RoundingRates(an_input=1e-4, by_sums=1e-9, nearest=1e-10))
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "settings", [{"steps": 0}, {"steps": 2}, {"keep_activation": True}], ids=str
)
def test_what_is_counted_is_what_is_rounded(make_model, text_file, tmp_path, monkeypatch, settings):
    seen = []
    by_sums = Grid.by_sums

    def record(grid, weight, *given):
        seen.append((weight.shape[1], len(weight)))
        return by_sums(grid, weight, *given)

    monkeypatch.setattr(Grid, "by_sums", record)
    monkeypatch.setattr(plans, "measured", lambda device, rounds: RATES)
    source = make_model("llama")
    fit = Fit(data=[str(text_file)], bits=4, **QUICK | settings)
    done = convert(source, tmp_path / "out", data=fit.data, bits=4, **QUICK | settings)
    shape = shape_of(open_checkpoint(source))
    rank = done.fitted.map_neurons
    norms = 2 * 32
    counted = Rounding(fit, 32, 96, rank, shape.num_weights - norms, fit.tokens)._by_sums()
    assert sorted(counted) == sorted(seen[: len(seen) // 2])  # of two layers
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]


def of(**settings):
    shape = plans.Shape(28, 1536, 8960, 46_797_824, 466_748_928, 151_936)
    return planned(shape, Fit(data=["x"], **settings), CPU, RATES)


def test_bits_take_time_and_the_model_itself_takes_less():
    plain, fitted, itself = of(), of(bits=4), of(bits=4, keep_activation=True)
    assert plain.seconds < fitted.seconds < 1.5 * plain.seconds
    assert itself.seconds < plain.seconds
    assert (itself.map_neurons, itself.bits, plain.bits) == (0, 4, None)


def test_each_input_in_turn_and_each_step_are_counted(monkeypatch):
    monkeypatch.setattr(plans, "OVERHEAD", {"cpu": 0.0})
    K, N, R = 1536, 8960, of(bits=4).map_neurons
    only = replace(RATES, rounding=RoundingRates(1.0, 0.0, 0.0))
    shape = plans.Shape(1, K, N, 46_797_824, 0, 0)
    assert planned(shape, Fit(bits=4), CPU, only).seconds == 4 * K + N + R
    steps = replace(RATES, rounding=RoundingRates(0.0, 0.0, 1.0))
    assert planned(shape, Fit(bits=4, steps=7), CPU, steps).seconds == 7 * 3 * N * K


def test_memory_of_the_largest_sums_is_counted():
    plain, fitted = of(), of(bits=4)
    assert plain.bytes < fitted.bytes < 1.1 * plain.bytes


def test_a_plan_says_what_is_rounded(capfd):
    screen.planned(of(bits=4))
    screen.planned(of(bits=4, keep_activation=True))
    said = capfd.readouterr().out
    assert "28 layers of 1536 x 8960 and a map of rank 768, linear layers in 4 bits" in said
    assert "28 layers of 1536 x 8960, linear layers in 4 bits" in said


def test_rates_are_measured_on_this_device(monkeypatch):
    monkeypatch.setattr(plans, "PROBE", {"cpu": 64})
    rates = plans.measured(CPU, rounds=True).rounding
    assert rates.an_input > 0
    assert rates.nearest > 0
    assert plans.measured(CPU, rounds=False).rounding is None
