"""When a layer's contest is due, what follows from it, and what is said."""

import pytest
import torch
from finetune_runs import small
from torch import nn

from twellctl import layer_routes
from twellctl.bundle.twell_model import GateThreshold, TwellFFN
from twellctl.bundle.twell_train import FfnMeter
from twellctl.finetune import finetune
from twellctl.layer_routes import DENSE, TWELL, LayerRoutes, NoKernels, Times
from twellctl.progress import Progress


class Ffn(TwellFFN, nn.Module):
    """The smallest FFN with a meter."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(4, 4) for _ in range(3))
        self.act_fn, self.twell_meter = GateThreshold(0.0), FfnMeter()
        self.twell_tile, self.twell_slots = 256, 64


class Model:
    """Some FFNs that are trained; how long a contest will say they take, and those it was asked."""

    def __init__(self, monkeypatch, layers=1):
        self.said, self.asked = [], []
        self.times = {DENSE: 2.0, TWELL: 1.0}
        self.host = {DENSE: 0.1, TWELL: 0.9}
        self.spare = 9.0
        self.ffns = [Ffn() for _ in range(layers)]
        monkeypatch.setattr(layer_routes, "_why_closed", lambda device: None)
        monkeypatch.setattr(layer_routes, "contest", self.contest)
        self.routes = LayerRoutes(self.ffns, self.said.append)

    def contest(self, ffn, x):
        self.asked.append(self.ffns.index(ffn))
        if isinstance(self.times, Exception):
            raise self.times
        return {route: Times(gpu, self.host[route]) for route, gpu in self.times.items()}

    def step(self, *densities) -> list[str]:
        """The routes of a step after one with these densities."""
        self.routes.update(list(densities), self.spare)
        for ffn in self.ffns:
            ffn(torch.zeros(1, 4))
        return [ffn.twell_meter.route for ffn in self.ffns]


def test_a_layer_goes_over_when_it_pays_and_back(monkeypatch):
    model = Model(monkeypatch)
    assert model.step(0.5) == [None]
    assert model.asked == []
    assert model.step(0.02) == [TWELL]
    assert model.said == [
        "layer 0 is over TwELL, at 2.00% density: 1.00 ms against 2.00 dense, forward and backward"
    ]
    assert model.step(0.001) == [TWELL]
    assert model.step(0.0259) == [TWELL]
    assert model.asked == [0]
    assert model.step(0.0261) == [TWELL]
    assert model.asked == [0, 0]
    assert model.step(0.031) == [DENSE]
    assert model.said[1:] == ["layer 0 is dense again, at 3.10% density"]


def test_a_layer_keeps_the_kernels_only_as_far_as_the_times_go(monkeypatch):
    model = Model(monkeypatch)
    model.times = {DENSE: 1.1, TWELL: 1.0}
    assert model.step(0.02) == [TWELL]
    assert model.step(0.02 * 1.1 * 1.02 - 1e-5) == [TWELL]
    assert model.asked == [0]
    model.times = {DENSE: 1.1, TWELL: 1.12}
    assert model.step(0.02 * 1.1 * 1.02 + 1e-5) == [DENSE]
    assert model.asked == [0, 0]
    assert model.said[1].startswith(
        "layer 0 is dense again, at 2.25% density: 1.12 ms against 1.10"
    )


def test_who_lost_tries_again_when_enough_has_gone(monkeypatch):
    model = Model(monkeypatch)
    model.times = {DENSE: 1.0, TWELL: 0.98}  # too little to change
    for density in (0.02, 0.029, 0.016, 0.0154):
        assert model.step(density) == [DENSE]
    assert model.asked == [0]
    model.times = {DENSE: 1.0, TWELL: 0.9}
    assert model.step(0.0153) == [TWELL]
    assert model.asked == [0, 0]
    assert len(model.said) == 1


def test_who_lost_by_far_waits_until_it_may_win(monkeypatch):
    model = Model(monkeypatch)
    model.times = {DENSE: 1.0, TWELL: 4.0}
    first_again = 0.02 / 1.3**2
    for density in (0.02, 0.013, first_again + 1e-5):
        assert model.step(density) == [DENSE]
    assert model.asked == [0]
    model.times = {DENSE: 1.0, TWELL: 0.9}
    assert model.step(first_again - 1e-5) == [TWELL]


def test_layers_are_judged_one_by_one(monkeypatch):
    model = Model(monkeypatch, layers=3)
    assert model.step(0.02, 0.5, 0.01) == [TWELL, None, TWELL]
    assert model.asked == [0, 2]


def test_the_hosts_time_counts_where_it_is_not_spare(monkeypatch):
    model = Model(monkeypatch, layers=4)
    model.host, model.spare = {DENSE: 0.5, TWELL: 2.5}, 5.0
    assert model.step(0.02, 0.02, 0.02, 0.02) == [TWELL, TWELL, DENSE, DENSE]
    assert len(model.said) == 2
    model.spare = 0.0
    model.times = {DENSE: 3.0, TWELL: 1.0}
    assert model.step(0.02, 0.02, 0.015, 0.02) == [TWELL, TWELL, TWELL, DENSE]
    assert "2.50 ms against 3.00 dense" in model.said[2]


def test_evaluation_holds_no_contest(monkeypatch):
    model = Model(monkeypatch)
    model.ffns[0].eval()
    assert model.step(0.02) == [None]
    model.ffns[0].train()
    with torch.no_grad():
        assert model.step(0.02) == [None]
    assert model.step(0.02) == [TWELL]
    assert model.asked == [0]


def test_kernels_that_refuse_are_asked_once(monkeypatch):
    model = Model(monkeypatch, layers=2)
    model.times = NoKernels("the kernels take bf16, not float16")
    assert model.step(0.02, 0.02) == [DENSE, DENSE]
    assert model.step(0.01, 0.01) == [DENSE, DENSE]
    assert model.asked == [0]
    assert model.said == ["FFNs are trained densely: the kernels take bf16, not float16"]


def test_too_little_memory_leaves_a_layer_dense_for_now(monkeypatch):
    model = Model(monkeypatch)
    model.times = torch.OutOfMemoryError("CUDA out of memory")
    assert model.step(0.02) == [DENSE]
    assert model.said == ["layer 0 is dense: no memory to try TwELL"]
    model.times = {DENSE: 2.0, TWELL: 1.0}
    assert model.step(0.019) == [DENSE]
    assert model.step(0.015) == [TWELL]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may take the kernels")
@pytest.mark.parametrize(
    ("route", "wanted"),
    [
        ("", "FFNs are trained densely: no Hopper GPU"),
        ("twell", "TWELL_ROUTE=twell decides how FFNs are trained"),
    ],
)
def test_a_run_without_contests_says_so_once(
    relu_llama, text_file, tmp_path, monkeypatch, capfd, route, wanted
):
    monkeypatch.setenv("TWELL_ROUTE", route)
    recipe = small(text_file, penalty="l1", max_steps=2)
    finetune(relu_llama, tmp_path / "out", recipe, progress=Progress())
    said = [line for line in capfd.readouterr().err.splitlines() if "FFNs are trained" in line]
    assert len(said) == 1
    assert wanted in said[0]
