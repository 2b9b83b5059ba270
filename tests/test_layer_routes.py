"""When a layer's contest is due, what follows from it, and what is said."""

import pytest
import torch
from finetune_runs import small
from torch import nn

from twellctl.bundle.twell_log import say_once
from twellctl.bundle.twell_model import TwellFFN
from twellctl.bundle.twell_train import FfnMeter
from twellctl.finetune import finetune
from twellctl.training import layer_routes
from twellctl.training.layer_routes import DENSE, TWELL, LayerRoutes
from twellctl.training.progress import Progress

pytestmark = pytest.mark.usefixtures("no_answers")


class Ffn(TwellFFN, nn.Module):
    """The smallest FFN with a meter."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(4, 4) for _ in range(3))
        self.act_fn, self.twell_meter = nn.ReLU(), FfnMeter()
        self.twell_tile, self.twell_slots = 256, 64


class Model:
    """Some FFNs that are trained; how long a pass of theirs will have taken, and who held contests.

    A step has one pass a layer. `refusal` is what the kernels say of it.
    """

    def __init__(self, monkeypatch, layers=1):
        self.said, self.asked, self.steps, self.refusal = [], [], 0, None
        self.times = {DENSE: 2.0, TWELL: 1.0}
        self.first = 0.0  # what the first pass takes beyond that
        self.ffns = [Ffn() for _ in range(layers)]
        self.now = 1000.0
        begin, model = layer_routes._Layer.begin, self

        def noted(layer, density):
            model.asked.append(layer.number)
            begin(layer, density)

        class Passes:
            def __init__(self):
                self.count = 0

            def watch(self, x):
                return self.end

            def end(self, y):
                self.count += 1

            def milliseconds(self):
                ways = (layer.contest.items() for layer in model.routes.layers)
                way = next(way for items in ways for way, passes in items if passes is self)
                times = [model.times[way]] * self.count
                return [times[0] + model.first, *times[1:]] if times else []

        monkeypatch.setattr(layer_routes, "_why_closed", lambda device: None)
        monkeypatch.setattr(layer_routes, "Passes", Passes)
        monkeypatch.setattr(layer_routes._Layer, "begin", noted)
        monkeypatch.setattr(layer_routes.time, "monotonic", lambda: self.now)
        self.routes = LayerRoutes(self.ffns, self.said.append)

    @property
    def ways(self) -> list[str | None]:
        return [ffn.twell_meter.route for ffn in self.ffns]

    def step(self, *densities) -> list[str | None]:
        """The routes of a step after one with these densities."""
        self.now += 100.0
        self.steps += 1
        self.routes.update(list(densities))
        for ffn in self.ffns:
            ffn(torch.zeros(1, 4))
            if self.refusal and ffn.twell_meter.route == TWELL:
                say_once(self.refusal)
        return self.ways

    def settle(self, *densities) -> list[str | None]:
        """The same once there is no contest any more."""
        for _ in range(20):
            self.step(*densities)
            if not any(layer.contest for layer in self.routes.layers):
                return self.ways
        raise AssertionError("a contest does not end")


def test_a_contest_times_some_passes_of_either_way(monkeypatch):
    model = Model(monkeypatch)
    model.first = 50.0  # is not counted
    ways = [model.step(0.02)[0] for _ in range(10)]
    assert ways == [DENSE] * 4 + [TWELL] * 6
    assert model.said == [
        "layer 0 is over TwELL, at 2.00% density: 1.00 ms against 2.00 dense, forward and backward"
    ]
    assert model.ffns[0].twell_meter.watch is None
    assert model.asked == [0]


def test_a_layer_goes_over_when_it_pays_and_back(monkeypatch):
    model = Model(monkeypatch)
    assert model.step(0.5) == [None]
    assert model.step(0.03) == [None]
    assert model.asked == []
    assert model.settle(0.02) == [TWELL]
    assert model.step(0.001) == [TWELL]
    assert model.step(0.0259) == [TWELL]
    assert model.asked == [0]
    assert model.settle(0.0261) == [TWELL]
    assert model.asked == [0, 0]
    assert model.step(0.031) == [DENSE]
    assert model.said[1:] == ["layer 0 is dense again, at 3.10% density"]


def test_a_contest_ends_where_density_has_risen(monkeypatch):
    model = Model(monkeypatch)
    for _ in range(5):
        model.step(0.029)
    assert model.ways == [TWELL]
    assert model.step(0.031) == [DENSE]
    assert model.step(0.031) == [DENSE]
    assert model.ffns[0].twell_meter.watch is None


def test_a_layer_keeps_the_kernels_only_as_far_as_the_times_go(monkeypatch):
    model = Model(monkeypatch)
    model.times = {DENSE: 1.1, TWELL: 1.0}
    assert model.settle(0.02) == [TWELL]
    assert model.step(0.02 * 1.1 * 1.02 - 1e-5) == [TWELL]
    assert model.asked == [0]
    model.times = {DENSE: 1.1, TWELL: 1.12}
    assert model.settle(0.02 * 1.1 * 1.02 + 1e-5) == [DENSE]
    assert model.asked == [0, 0]
    assert model.said[1].startswith(
        "layer 0 is dense again, at 2.25% density: 1.12 ms against 1.10"
    )


def test_who_lost_tries_again_when_enough_has_gone(monkeypatch):
    model = Model(monkeypatch)
    model.times = {DENSE: 1.0, TWELL: 0.98}  # too little to change
    assert model.settle(0.02) == [DENSE]
    for density in (0.029, 0.016, 0.0154):
        assert model.step(density) == [DENSE]
    assert model.asked == [0]
    model.times = {DENSE: 1.0, TWELL: 0.9}
    assert model.settle(0.0153) == [TWELL]
    assert model.asked == [0, 0]
    assert len(model.said) == 1


def test_who_lost_by_far_ends_soon_and_waits_until_it_may_win(monkeypatch):
    model = Model(monkeypatch)
    model.times = {DENSE: 1.0, TWELL: 4.0}
    assert [model.step(0.02)[0] for _ in range(7)] == [DENSE] * 4 + [TWELL] * 2 + [DENSE]
    first_again = 0.02 / 1.3**2
    for density in (0.013, first_again + 1e-5):
        assert model.step(density) == [DENSE]
    assert model.asked == [0]
    model.times = {DENSE: 1.0, TWELL: 0.9}
    assert model.settle(first_again - 1e-5) == [TWELL]


def test_contests_take_a_small_share_of_the_run(monkeypatch):
    model = Model(monkeypatch, layers=2)
    model.times = {DENSE: 1000.0, TWELL: 4000.0}
    assert model.settle(0.02, 0.5) == [DENSE, None]
    lost = 2 * 3.0  # seconds
    model.step(0.02, 0.5)
    model.now = 1100.0 + lost / 0.005 - 101.0  # a step before the time has come
    model.step(0.02, 0.02)
    assert model.asked == [0]
    model.step(0.02, 0.02)
    assert model.asked == [0, 1]


def test_layers_are_judged_one_by_one(monkeypatch):
    model = Model(monkeypatch, layers=3)
    assert model.settle(0.02, 0.5, 0.01) == [TWELL, None, TWELL]
    assert model.asked == [0, 2]


def test_evaluation_is_not_timed(monkeypatch):
    model = Model(monkeypatch)
    model.ffns[0].eval()
    for _ in range(20):
        assert model.step(0.02) == [DENSE]
    model.ffns[0].train()
    with torch.no_grad():
        for _ in range(20):
            assert model.step(0.02) == [DENSE]
    assert model.settle(0.02) == [TWELL]


def test_kernels_that_refuse_are_asked_once(monkeypatch, caplog):
    model = Model(monkeypatch, layers=2)
    model.refusal = "the kernels take bf16, not float16"
    for _ in range(20):
        model.step(0.02, 0.02)
    assert model.step(0.01, 0.01) == [DENSE, DENSE]
    assert model.asked == [0, 1]
    assert model.said == ["FFNs are trained densely: the kernels take bf16, not float16"]
    assert not caplog.records


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may take the kernels")
@pytest.mark.parametrize(
    ("route", "wanted"),
    [
        ("", "FFNs are trained densely: no Hopper GPU"),
        ("twell", "TWELL_ROUTE=twell decides how FFNs are trained"),
    ],
)
def test_a_run_without_contests_says_so_once(
    relu_llama, text_file, tmp_path, monkeypatch, route, wanted
):
    monkeypatch.setenv("TWELL_ROUTE", route)
    recipe, notes, progress = small(text_file, penalty="l1", max_steps=2), [], Progress()
    progress.note = notes.append
    finetune(relu_llama, tmp_path / "out", recipe, progress=progress)
    said = [note for note in notes if "FFNs are trained" in note]
    assert len(said) == 1
    assert wanted in said[0]
